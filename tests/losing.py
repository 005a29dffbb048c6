"""Worlds that lose a rank, or in which one makes another call: what every rank must raise, over any backend."""

from __future__ import annotations

import re
from typing import Any

from worlds import Outcome, World

TIMEOUT = 3.0
STARTING = 25.0  # seconds that a world may take besides
PROMISED = 0.5  # seconds after it within which every rank has raised PeerLost, where no rank is held up
DISAGREEING = 2.0  # seconds within which every rank has raised Disagreement, where no rank is held up

WORDS = {
    "length": "length is 14 on rank 1, and 13 on ranks 0, 2;",
    "dtype": "dtype is torch.float64 on rank 1, and torch.float32 on ranks 0, 2;",
    "heads": "heads is 6 on rank 1, and 4 on ranks 0, 2;",
    "kv heads": "kv heads is 4 on rank 1, and 2 on ranks 0, 2;",
    "causal": "causal=False",
    "segments": "12",
    "documents": "6",
    "schedule": "schedule is 'gather' on rank 1, and 'ring' on ranks 0, 2;",
    "scale": "scale is 0.5 on rank 1, and 0.25 on ranks 0, 2;",
    "deterministic": "deterministic is True on rank 1, and False on ranks 0, 2;",
    "version": "longring's version is '0.0.9' on rank 1, and '",
    "operation": "call is ",
}
"""What a rank can do differently in `programs.attention_that_differs`, and how all three are told."""


def world_of(size: int, program: str, args: tuple[Any, ...], **world: Any) -> World:
    """Ranks that run one of `programs`, their messages on the GPU where the backend is NCCL."""
    if "nccl" in world.get("backend", ""):
        program, args = "on_nccl", (program, *args)
    return World(size, f"programs:{program}", args, **world)


def losses(
    size: int,
    victim: int,
    post: int,
    how: str,
    *more: Any,
    program: str = "ring_with_a_victim",
    calls: int = 3,
    starting: float = STARTING,
    timeout: float = TIMEOUT,
    **world: Any,
) -> tuple[list[int | None], list[Outcome]]:
    """The ranks that survivors named, and all outcomes; all else that survivors promise is asserted."""
    args = (victim, post, how, timeout, calls + 1, *more)  # a call more: who had all it needed meets the loss there
    outcomes = world_of(size, program, args, **world).run(limit=timeout + starting)
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    case = f"{program}, {how} rank {victim} of {size} at post {post} {more} {world}"
    for outcome in survivors:
        assert outcome.status == 0, f"{case}: ended with {outcome.status}\n{outcome.text}\n{outcome.printed}"
        assert outcome.error == "PeerLost", f"{case}: {outcome.error} {outcome.text} {outcome.value}\n{outcome.printed}"
        assert outcome.phase_and_step, case
        assert f"({outcome.phase_and_step})" in outcome.text, case
    if how != "raise":
        late, allowed = max(raised_after(outcomes, victim)) - timeout, PROMISED + held_up(outcomes)
        assert late < allowed, f"{case}: raised {late:.2f} s after the timeout, and {allowed:.2f} s are allowed"
    return [outcome.rank_named for outcome in survivors], outcomes


def raised_after(outcomes: list[Outcome], victim: int) -> list[float]:
    """Seconds from the moment the victim was struck until each other rank raised."""
    struck = re.search(r"struck at ([\d.]+)", outcomes[victim].printed)
    assert struck, f"rank {victim} was not struck: {outcomes[victim]}"
    return [outcome.at - float(struck[1]) for rank, outcome in enumerate(outcomes) if rank != victim]


def held_up(outcomes: list[Outcome]) -> float:
    """Seconds by which a busy machine may have made them late: a verdict goes through several ranks, one by one."""
    return sum(outcome.held_up for outcome in outcomes)


def disagreements(kind: str, good: int, *, limit: float = 30.0, **world: Any) -> list[float]:
    """Rank 1 of three makes another call after `good` ones: seconds until each had raised, which are asserted, too."""
    outcomes = world_of(3, "attention_that_differs", (good, 1, kind), **world).run(limit)
    for rank, outcome in enumerate(outcomes):
        assert outcome.value is None, f"rank {rank} has a result: {outcome.value}"
        assert outcome.error == "Disagreement", f"rank {rank}: {outcome.error}: {outcome.text}\n{outcome.printed}"
        assert outcome.status == 0, f"rank {rank} ended with {outcome.status}\n{outcome.printed}"
    messages = {outcome.text for outcome in outcomes}
    assert len(messages) == 1
    message = messages.pop()
    assert message.startswith("ranks disagree: ")
    assert WORDS[kind] in message
    assert message.count("on rank 1, and ") >= 1
    assert message.endswith("; all ranks must make the same call")
    assert all(outcome.seconds is not None for outcome in outcomes)
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    allowed = DISAGREEING + held_up(outcomes)
    assert max(seconds) < allowed, f"raised after {seconds} s, and {allowed:.2f} s are allowed"
    return seconds
