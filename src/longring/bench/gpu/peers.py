"""Peers beside longring in one process: torch's own attention, FlexAttention, and other rings re-created."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...geometry.patterns import Dense
from ...schedules.buffers import release_buffers
from ..records import Row
from .contest import Differentiated, Entry, Stage, compare, contest
from .direct import direct_kernels
from .given import Given, Shape, given
from .recreated import RingFlashAttention, TransformerEngine, Ulysses, Yunchang
from .ring import one_call
from .virtual_ring import VirtualRing

CAUSAL = Dense(causal=True)
TO_LONGRING = "times longring's time"
BACKENDS = {
    "cuda": {
        "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
        "SDPA, flash": SDPBackend.FLASH_ATTENTION,
        "SDPA, efficient": SDPBackend.EFFICIENT_ATTENTION,
    },
    "cpu": {"SDPA, flash": SDPBackend.FLASH_ATTENTION},
}


def run(stage: Stage) -> Iterator[Row]:
    shape, ranks = stage.sizes.peers
    yield from one_device(stage, shape)
    yield from rings(stage, shape, ranks)


def one_device(stage: Stage, shape: Shape) -> list[Row]:
    x = given(shape, stage.place)
    peers = [
        Differentiated(name, x, _sdpa(backend), kind="package") for name, backend in BACKENDS[stage.device.type].items()
    ]
    if stage.device.type == "cuda":  # it has no backward on the CPU
        attend = flex(shape.n, lambda b, h, i, j: i >= j, stage.device)
        peers.append(Differentiated("FlexAttention, compiled", x, attend, kind="package"))
    rows = contest(stage, f"one call, causal, {shape}", shape, CAUSAL, x, [one_call(x), *peers])
    return beside(rows, "one call")


def rings(stage: Stage, shape: Shape, ranks: int) -> list[Row]:
    x = given(shape, stage.place)
    ours = VirtualRing(x, CAUSAL, ranks)
    rows = contest(stage, f"{ranks} ranks, causal, {shape}", shape, CAUSAL, x, [ours, *recreated(stage, x, ranks)])
    release_buffers()
    return beside(rows, ours.name)


def recreated(stage: Stage, x: Given, ranks: int) -> list[Entry]:
    """Over the kernels that their packages use: flash-attn 2 is torch's flash, TransformerEngine's is cuDNN."""
    kernels = direct_kernels(stage.device)
    flash = kernels.get("flash") or kernels["cpu"]
    cudnn = kernels.get("cudnn") or kernels["cpu"]
    return [
        RingFlashAttention(x, ranks, flash),
        Yunchang(x, ranks, flash),
        TransformerEngine(x, ranks, cudnn),
        Ulysses(x, ranks, cudnn),
    ]


def beside(rows: list[Row], ours: str) -> list[Row]:
    for mine in [row for row in rows if row.name == ours]:
        for name in {row.name for row in rows} - {ours}:
            compare(rows, name, mine, TO_LONGRING)
    return rows


def _sdpa(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, None]]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None

    return attend


def flex(
    n: int, mask: Callable[..., Tensor], device: torch.device
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, None]]:
    """Compiled when first called, which takes a while."""
    made: list[tuple[Any, Any]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        if not made:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            torch.compiler.reset()  # else it tries to serve every mask at once, and computes them uncompiled
            blocks = create_block_mask(mask, None, None, n, n, device=device, _compile=True)
            made.append((torch.compile(flex_attention, dynamic=False), blocks))
        compiled, blocks = made[0]
        is_shared = q.shape[2] != k.shape[2]
        out = compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=blocks, enable_gqa=is_shared)
        return out.transpose(1, 2), None

    return attend
