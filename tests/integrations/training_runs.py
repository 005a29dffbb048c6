"""A run of three steps of a small decoder: in one process, and what each rank of a mesh has of the same run.

Two sequences of 29 tokens, of which one has fewer targets than the other: over 2 x 2 ranks tokens are uneven, and the
mean over all targets is not the mean of any means. The optimiser is SGD with momentum, since Adam hides a wrong
factor of its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import longring as lr
from longring.models import Decoder, DecoderConfig
from longring.nn import cross_entropy, next_tokens
from longring.testing import relative_error

DATA, CONTEXT = 2, 2
BATCH, LENGTH, WORDS, STEPS = 2, 29, 19, 3
CONFIG = DecoderConfig(vocab_size=WORDS, dim=16, layers=2, heads=4, kv_heads=2, feedforward_dim=24)
TIMEOUT = 60.0
SLACK = 4.0  # a gradient is summed in another order, in three places: within a layer, over tokens, and over ranks


class Run(NamedTuple):
    """What is left of a run; parameters are whole."""

    losses: list[float]
    parameters: dict[str, Tensor]


def made(dtype: torch.dtype, **options: Any) -> Decoder:
    """The same weights in every process; norms too differ from 1, which hides mistakes."""
    torch.manual_seed(5)
    model = Decoder(CONFIG, dtype=torch.float64, timeout=TIMEOUT, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def optimiser_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def whole_batch(number: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """(tokens, targets), both [batch, n]."""
    draw = torch.Generator().manual_seed(number)
    stride = torch.randint(1, 3, (BATCH, length), generator=draw)  # something to learn: the next is one or two further
    tokens = stride.cumsum(1) % WORDS
    return tokens, next_tokens(tokens, lengths=[length, length * 2 // 3])


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """By their names before anything was wrapped; FSDP2's are gathered."""
    found = {}
    for name, value in model.named_parameters():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[operator]
        found[unwrapped(name)] = whole.detach().clone().cpu()
    return found


WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


# ----------------------------------------------------------------------------------------------------- one process


@cache
def alone(
    dtype: torch.dtype, batches_a_step: int = 1, length: int = LENGTH, clip: float = 0, autocast: bool = False
) -> Run:
    """The whole sequences, in one process.

    batches_a_step:  a step may take the mean of several batches' gradients.
    clip:            the norm that gradients are cut down to; 0 for none.
    autocast:        matrix products in bfloat16.
    """
    model = made(dtype)
    optimiser = optimiser_of(model)
    losses = []
    for step in range(STEPS):
        optimiser.zero_grad()
        for number in range(step * batches_a_step, (step + 1) * batches_a_step):
            tokens, targets = whole_batch(number, length)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = cross_entropy(model(tokens), targets)
            (loss / batches_a_step).backward()
            losses.append(loss.item())
        if clip:
            assert nn.utils.clip_grad_norm_(model.parameters(), clip) > 2 * clip, "or clipping shows nothing"
        optimiser.step()
    return Run(losses, whole_parameters(model))


def check(run: Run, dtype: torch.dtype, *, since: int = 0, **words: Any) -> None:
    """The run is that of one process in float64, but for what its dtype rounds: as much as it does in one process.

    since:  the step with which the run began, from what another had saved.
    words:  those of `alone`.
    """
    want = alone(torch.float64, **{**words, "autocast": False})
    assert abs(want.losses[0] - want.losses[-1]) > 0.02, "a run that learns nothing shows nothing"
    rough = alone(torch.float32, **words)  # float64 is no yardstick for itself
    finer = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    off = max(abs(a - b) for a, b in zip(rough.losses, want.losses, strict=True))
    for got, loss in zip(run.losses, want.losses[since:], strict=True):
        assert abs(got - loss) <= SLACK * finer * (off + loss * 2**-23), (run.losses, want.losses)
    assert sorted(run.parameters) == sorted(want.parameters)
    allowed = SLACK * finer * max(relative_error(rough.parameters[name], p) for name, p in want.parameters.items())
    for name, parameter in want.parameters.items():
        assert relative_error(run.parameters[name], parameter) <= allowed, name


# -------------------------------------------------------------------------------------------------- ranks of a mesh


@dataclass(frozen=True)
class Place:
    """Where this rank stands: one of the rings, of which each has sequences of its own, and one of its ranks."""

    mesh: Any
    sharding: lr.Sharding
    device: str = "cpu"

    @classmethod
    def on_a_mesh(
        cls, data: int = DATA, context: int = CONTEXT, layout: str = "zigzag", length: int = LENGTH, device: str = "cpu"
    ) -> Place:
        mesh = dist.init_device_mesh(device, (data, context), mesh_dim_names=("data", "context"))
        return cls(mesh, lr.Sharding(length, mesh["context"], layout), device)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """(tokens, targets) of this rank."""
        rows = BATCH // self.mesh["data"].size()
        first = self.mesh.get_local_rank("data") * rows
        tokens, targets = (
            self.sharding.shard(x[first : first + rows]).to(self.device)
            for x in whole_batch(number, self.sharding.length)
        )
        return tokens, targets

    def loss(self, model: Callable[..., Tensor], number: int, gradients: Any = "mean") -> Tensor:
        tokens, targets = self.batch(number)
        logits = model(tokens, sharding=self.sharding)
        return cross_entropy(
            logits, targets, sharding=self.sharding, group=self.mesh, gradients=gradients, timeout=TIMEOUT
        )


def trained(
    place: Place,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    *,
    steps: range = range(STEPS),
    batches_a_step: int = 1,
    clip: float = 0,
    autocast: bool = False,
    not_yet: Callable[[bool], AbstractContextManager[object]] = lambda is_last: nullcontext(),
) -> list[float]:
    """The losses of this many steps; `not_yet(False)` holds back what a framework does with gradients."""
    losses = []
    for step in steps:
        optimiser.zero_grad()
        for number, is_last in _batches(step, batches_a_step):
            with not_yet(is_last):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = place.loss(model, number)
                (loss / batches_a_step).backward()
            losses.append(loss.item())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimiser.step()
    return losses


def _batches(step: int, count: int) -> Iterator[tuple[int, bool]]:
    return ((step * count + i, i == count - 1) for i in range(count))
