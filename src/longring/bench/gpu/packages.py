"""Other people's dilated attention, run from their own sources, which lie in a folder given by --peers.

The folder has a clone of each: torchscale, dilated-attention-pytorch, and einops, which both import. flash-attn and
xformers, which they ask for, are stood in for by torch's own fused attention, which is the same algorithm.
"""

from __future__ import annotations

import importlib
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...geometry.patterns import Dilated
from .check import Result
from .clock import Turn
from .contest import Differentiated, Entry, Stage
from .direct import aten
from .given import Given

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Package(Differentiated):
    """Another's code. It computes something else, so its errors are told and not judged.

    torchscale has its heads in other phases and stops gradients at the mixing weights; fkodom's attends in some heads
    for each branch and divides by a sum over the whole sequence.
    """

    def __init__(self, name: str, x: Given, attend: Attend, instead: Dilated) -> None:
        super().__init__(name, x, lambda q, k, v: (attend(q, k, v), None), kind="package")
        self.instead = instead

    def result(self) -> Result:
        found = super().result()
        self.forget()
        return Result(found.out, dq=found.dq)

    def turn(self, phase: str) -> Turn:
        """What they save for a backward is many times what is computed, and is there for their turn alone."""
        if phase == "forward":
            return Turn(self.forward)
        return Turn(self.backward, self.remember, self.forget)


def dilated_peers(stage: Stage, x: Given, pattern: Dilated) -> list[Entry]:
    """Those that can be imported; of the others it is noted that they are missing."""
    heads, d = x.q.shape[2:]
    makers = {
        "torchscale": (lambda: torchscale_attention(heads, d, pattern), replace(pattern, phase="block")),
        "fkodom": (lambda: fkodom_attention(pattern), pattern),
    }
    found: list[Entry] = []
    with clones_in(stage.peers):
        for name, (make, instead) in makers.items():
            try:
                found.append(Package(name, x, make(), instead))
            except ImportError as error:
                note = f"{name}'s dilated attention is missing: {error}"
                if note not in stage.missing:
                    stage.missing.append(note)
    return found


@contextmanager
def clones_in(folder: Path | None) -> Iterator[None]:
    """Importable for as long as this lasts, behind everything that is installed."""
    clones = sorted(str(clone) for clone in folder.iterdir() if clone.is_dir()) if folder else []
    before = list(sys.path)
    sys.path += clones
    try:
        yield
    finally:
        sys.path[:] = before


def torchscale_attention(heads: int, d: int, pattern: Dilated) -> Attend:
    """The authors' module without its projections: attention alone, as everywhere here."""
    base: Any = importlib.import_module("torchscale.component.multihead_attention")
    module: Any = importlib.import_module("torchscale.component.dilated_attention")
    base.flash_attn_func = base.flash_attn_func or _flash
    settings = Namespace(
        multiway=False,
        layernorm_eps=1e-5,
        xpos_rel_pos=False,
        flash_attention=True,
        seq_parallel=False,
        segment_length=list(pattern.segment_lengths),
        dilated_ratio=list(pattern.dilation_rates),
    )
    attention = module.DilatedAttention(settings, heads * d, heads, self_attention=True)
    for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(attention, projection, nn.Identity())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = attention(q.flatten(2), k.flatten(2), v.flatten(2), is_causal=pattern.causal)
        return out.unflatten(2, (heads, d))

    return attend


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, bias: None, scale: float | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """For flash_attn_func of flash-attn 2, lse included."""
    assert not dropout
    assert bias is None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    on_cpu = q.device.type == "cpu"
    attend = aten._scaled_dot_product_flash_attention_for_cpu if on_cpu else aten._scaled_dot_product_flash_attention
    out, lse, *_ = attend(q, k, v, 0.0, is_causal, scale=scale)
    return out.transpose(1, 2), lse


def fkodom_attention(pattern: Dilated) -> Attend:
    with _xformers():
        module: Any = importlib.import_module("dilated_attention_pytorch.dilated_attention")
    attention = module.DilatedAttention(list(pattern.segment_lengths), list(pattern.dilation_rates))
    return lambda q, k, v: attention(q, k, v, is_causal=pattern.causal)


@contextmanager
def _xformers() -> Iterator[None]:
    """xformers, or a stand-in for the little of it that is used, for as long as a module is being imported."""
    try:
        importlib.import_module("xformers.ops")
    except ImportError:
        package: Any = types.ModuleType("xformers")
        package.ops = ops = types.ModuleType("xformers.ops")
        ops.__dict__.update(
            AttentionOp=object, LowerTriangularMask=object, memory_efficient_attention=_memory_efficient_attention
        )
        sys.modules |= {"xformers": package, "xformers.ops": ops}
        try:
            yield
        finally:
            del sys.modules["xformers"], sys.modules["xformers.ops"]
    else:
        yield


def _memory_efficient_attention(query: Tensor, key: Tensor, value: Tensor, op: Any, attn_bias: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=attn_bias is not None).transpose(1, 2)
