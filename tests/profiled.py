"""A small profile made by hand, whose every number is known."""

from __future__ import annotations

import torch

from longring.bench.profiling.memory import GRADIENTS, KEYS, WORKSPACE, Sample
from longring.bench.profiling.rank import Asked, Peak
from longring.bench.profiling.run import Profile, Rank
from longring.bench.profiling.spans import Span
from longring.geometry.patterns import Dense

ASKED = Asked(
    tokens=64,
    ranks=2,
    nodes=1,
    batch=1,
    heads=2,
    kv_heads=2,
    head_dim=8,
    dtype=torch.float32,
    pattern=Dense(causal=True),
    layout="zigzag",
    schedule="ring",
    kernel="auto",
    device="cpu",
    with_backward=True,
    repeat=1,
    seed=0,
)


def rank_of_two(number: int) -> Rank:
    """Each sends 100 bytes of K and of V to the other in both passes, waits a little, and computes two steps."""
    other, late = 1 - number, 0.1 * number
    spans = []
    for phase, begin in (("forward", 0.0), ("backward", 10.0)):
        at = begin + late
        messages = ((other, 100), (other, 100))
        spans += [
            Span("post", "keys and values", phase, 1, at, at + 0.1),
            Span("send", "keys and values", phase, 1, at, at + 4.0, messages, messages),
            Span("compute", "own keys", phase, 0, at + 0.1, at + 3.0),
            Span("wait", "keys and values", phase, 1, at + 3.0, at + 4.0),
            Span("compute", f"keys of {other}", phase, 1, at + 4.0, at + 6.0),
            Span("merge", "results", phase, None, at + 6.0, at + 6.5),
        ]
    held = {"q": 1000, KEYS: 400}
    samples = [Sample(0.0, {"q": 1000}), Sample(0.2, held), Sample(11.0, {**held, GRADIENTS: 900, WORKSPACE: 50})]
    return Rank(
        rank=number,
        phases={"forward": (late, late + 6.6), "backward": (10.0 + late, 16.6 + late)},
        spans=spans,
        samples=samples,
        peaks={"forward": Peak(1400, held), "backward": Peak(2350, samples[-1].components)},
        predicted={"forward": Peak(1410, {"q": 1000, KEYS: 410}), "backward": Peak(2300, {"q": 1000, GRADIENTS: 1300})},
        predicted_steps={
            "forward": {"start": {"q": 1000}, "step 0": {"q": 1300}, "step 1": {"q": 1000, KEYS: 410}},
            "backward": {"tiles": {"q": 1000, GRADIENTS: 1300}},
        },
        bytes_sent={"forward": 200, "backward": 200},
        bytes_planned={"forward": 200, "backward": 200},
    )


def profile_of_two() -> Profile:
    return Profile(
        asked=ASKED,
        schedule="ring",
        layout="zigzag",
        kernel="sdpa",
        device="the CPU, 1 thread a rank",
        ranks=[rank_of_two(0), rank_of_two(1)],
        seconds={"forward": [6.7], "backward": [6.7]},
        chosen=0,
        unsure=1e-4,
    )
