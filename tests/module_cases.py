"""Modules with parameters, and what ranks make of them: outputs, and the gradient of every parameter and input."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import longring as lr
from longring.geometry.layouts import deal
from longring.nn import (
    DecoderLayer,
    DilatedAttention,
    EncoderLayer,
    Multihead,
    MultiheadAttention,
    MultiheadDilatedAttention,
    RingAttention,
    Rotary,
    XPos,
    magneto_gain,
)

BATCH, LENGTH, MEMORY, DIM, HEADS = 2, 23, 14, 24, 4  # uneven over 2 and 4 ranks
ONE_DRAWS = threading.Lock()  # ranks that are threads share the generator
BRANCHES = {"segment_lengths": [4, 8, 32], "dilation_rates": [1, 2, 4]}
BOUNDARIES = [0, 5, 6, 19, LENGTH]
LENGTHS = [LENGTH, 9]


@dataclass(frozen=True)
class Case:
    """A module, what it is called with besides tokens, and the pattern of its attention."""

    make: Callable[..., nn.Module]
    pattern: lr.Dense | lr.Dilated
    layout: str = "zigzag"
    told: dict[str, Any] = field(default_factory=dict)
    memory: int | None = None  # its width, where there is one
    memory_pattern: lr.Dense | None = None


def causal_window_gqa():
    return MultiheadAttention(
        DIM, HEADS, causal=True, window=(6, 0), kv_heads=2, positions=Rotary(DIM // HEADS), dtype=torch.float64
    )


def dilated_gqa_magneto(causal=True):
    return MultiheadDilatedAttention(
        DIM,
        HEADS,
        **BRANCHES,
        causal=causal,
        kv_heads=2,
        positions=XPos(DIM // HEADS, length=LENGTH, scale_base=16),
        sub_layernorm=True,
        gain=magneto_gain(decoder_layers=6),
        dtype=torch.float64,
    )


def ring_without_bias():
    rotary = Rotary(DIM // HEADS, layout="interleaved")
    return Multihead(DIM, HEADS, bias=False, attention=RingAttention(), positions=rotary, dtype=torch.float64)


def decoder_with_memory():
    return DecoderLayer(
        DIM,
        HEADS,
        kv_heads=2,
        cross_attention=True,
        memory_dim=10,
        positions=Rotary(DIM // HEADS),
        activation="relu",
        dtype=torch.float64,
    )


def encoder_magneto():
    gain = magneto_gain(encoder_layers=6, decoder_layers=2, of="encoder")
    attention = DilatedAttention(**BRANCHES, causal=False)
    return EncoderLayer(DIM, HEADS, attention=attention, sub_layernorm=True, gain=gain, dtype=torch.float64)


def decoder_swiglu():
    return DecoderLayer(DIM, HEADS, norm="rms", activation="swiglu", bias=False, kv_heads=1, dtype=torch.float64)


def padding_apart(lengths):
    return [sorted({0, length, LENGTH}) for length in lengths]


DENSE, OPEN = lr.Dense(), lr.Dense(causal=False)
CASES = {
    "torch's": Case(lambda: MultiheadAttention(DIM, HEADS, dtype=torch.float64), OPEN, "contiguous"),
    "window": Case(causal_window_gqa, lr.Dense(window=(6, 0))),
    "ring": Case(ring_without_bias, DENSE, "striped"),
    "lengths": Case(
        lambda: MultiheadAttention(DIM, HEADS, dtype=torch.float64),
        lr.Dense(causal=False, lengths=LENGTHS),
        told={"lengths": LENGTHS},
    ),
    "cross": Case(
        lambda: MultiheadAttention(DIM, HEADS, kdim=10, vdim=10, kv_heads=2, dtype=torch.float64), OPEN, memory=10
    ),
    "cross with positions": Case(
        lambda: MultiheadAttention(DIM, HEADS, kdim=10, vdim=10, positions=Rotary(6), causal=True, dtype=torch.float64),
        DENSE,
        memory=10,
    ),
    "dilated": Case(dilated_gqa_magneto, lr.Dilated([4, 8, 32], [1, 2, 4])),
    "dilated documents": Case(
        dilated_gqa_magneto,
        lr.Dilated([4, 8, 32], [1, 2, 4], documents=BOUNDARIES),
        "contiguous",
        {"documents": BOUNDARIES},
    ),
    "dilated lengths": Case(
        lambda: dilated_gqa_magneto(causal=False),
        lr.Dilated([4, 8, 32], [1, 2, 4], causal=False, documents=padding_apart(LENGTHS)),
        "contiguous",
        {"lengths": LENGTHS},
    ),
    "encoder": Case(encoder_magneto, lr.Dilated([4, 8, 32], [1, 2, 4], causal=False), "contiguous"),
    "encoder, norms last": Case(lambda: EncoderLayer(DIM, HEADS, norm_first=False, dtype=torch.float64), OPEN),
    "encoder, DeepNorm": Case(
        lambda: EncoderLayer(DIM, HEADS, norm_first=False, residual_scale=1.7, activation="silu", dtype=torch.float64),
        OPEN,
    ),
    "decoder": Case(decoder_swiglu, DENSE),
    "decoder with memory": Case(
        decoder_with_memory,
        lr.Dense(documents=BOUNDARIES),
        told={"documents": BOUNDARIES},
        memory=10,
        memory_pattern=OPEN,
    ),
}


class Found(NamedTuple):
    """What one process or rank has of a case."""

    out: Tensor
    inputs: list[Tensor]  # their gradients
    parameters: dict[str, Tensor]  # likewise


def inputs(case: Case) -> tuple[list[Tensor], Tensor]:
    """([tokens, memory if there is one], the gradient of the output), whole."""
    draw = torch.Generator().manual_seed(11)
    shapes = [(LENGTH, DIM), (MEMORY, case.memory)][: 1 if case.memory is None else 2]
    given = [torch.randn(BATCH, *shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return given, torch.randn(BATCH, LENGTH, DIM, generator=draw, dtype=torch.float64)


def made(case: Case) -> nn.Module:
    with ONE_DRAWS, torch.no_grad():
        torch.manual_seed(3)
        module = case.make()
        for parameter in module.parameters():  # biases and norms too: what is 0 or 1 hides mistakes
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def found(module: nn.Module, out: Tensor, given: list[Tensor], dout: Tensor) -> Found:
    names, parameters = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(out, (*given, *parameters), dout)
    return Found(out.detach(), list(gradients[: len(given)]), dict(zip(names, gradients[len(given) :], strict=True)))


def alone(case: Case) -> Found:
    """The module in one process, knowing nothing of ranks."""
    module, (given, dout) = made(case), inputs(case)
    given = [x.requires_grad_() for x in given]
    out = module(*given, **_spoken(case.told, case, None))
    return found(module, out[0] if isinstance(out, tuple) else out, given, dout)


def on_this_rank(names: list[str], group: Any = None) -> list[Found]:
    torch.set_num_threads(1)
    return [_on_this_rank(CASES[name], group or dist.group.WORLD) for name in names]


def _on_this_rank(case: Case, group: Any) -> Found:
    module, (whole, dout) = made(case), inputs(case)
    dealt = [lr.Sharding(x.shape[1], group, case.layout) for x in whole]
    given = [s.shard(x).requires_grad_() for s, x in zip(dealt, whole, strict=True)]
    out = module(*given, **_spoken(case.told, case, dealt))
    return found(module, out[0] if isinstance(out, tuple) else out, given, dealt[0].shard(dout))


def _spoken(told: dict[str, Any], case: Case, dealt: list[lr.Sharding] | None) -> dict[str, Any]:
    if dealt is None:
        return told
    told = {**told, "sharding": dealt[0]}
    if case.memory is not None:
        told["kv_sharding" if case.memory_pattern is None else "memory_sharding"] = dealt[1]
    return told


def together(case: Case, parts: list[Found]) -> Found:
    """Every rank's rows where they belong, and the sums of what every rank has of a parameter's gradient."""
    lengths = [LENGTH, MEMORY]
    return Found(
        in_place([part.out for part in parts], LENGTH, case.layout),
        [in_place([part.inputs[i] for part in parts], lengths[i], case.layout) for i in range(len(parts[0].inputs))],
        {name: sum(part.parameters[name] for part in parts) for name in parts[0].parameters},  # type: ignore[misc]
    )


def in_place(rows: list[Tensor], length: int, layout: str) -> Tensor:
    whole = torch.full((rows[0].shape[0], length, *rows[0].shape[2:]), torch.nan, dtype=rows[0].dtype)
    for shard, mine in zip(deal(layout, length, len(rows)).shards, rows, strict=True):
        whole[:, [position for r in shard for position in r]] = mine
    return whole


def check_same(got: Found, want: Found, what: str, tolerance: float = 1e-11) -> None:
    """Equal but for float64's rounding, relative to each quantity's own size."""
    pairs = {"out": (got.out, want.out)}
    pairs |= {f"gradient of input {i}": pair for i, pair in enumerate(zip(got.inputs, want.inputs, strict=True))}
    assert got.parameters.keys() == want.parameters.keys()
    pairs |= {f"gradient of {name}": (got.parameters[name], want.parameters[name]) for name in want.parameters}
    for name, (ours, theirs) in pairs.items():
        assert ours.shape == theirs.shape, (what, name)
        error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-6))
        assert error <= tolerance, (what, name, error)
