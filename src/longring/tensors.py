"""Which tensors a call takes: their kinds, shapes and dtypes, and what others are refused with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from .errors import ArgumentError, NotBuilt

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KINDS = {  # by their classes' names: importing the classes would load what most programs never use
    "DTensor": "pass this rank's tensor, x.to_local(), with a longring.Sharding that says which tokens it holds",
    "NestedTensor": "pack the sequences into one tensor, with documents=[0, b1, ..., n] for their boundaries",
    "FakeTensor": "it holds no numbers: pass real tensors or, compiled and exported, a sharding instead of group=",
    "MaskedTensor": "pass its data, with what the mask says as pattern=longring.Dense(...)",
}

MANY_HEADS = 64
"""From so many kv heads on, more of them than tokens is a sign that the two have changed places."""
TRANSPOSE = "; tensors are [batch, n, heads, d] here: from [batch, heads, n, d] they are x.transpose(1, 2)"


def spoken(value: object) -> str:
    """A value in one line: tensors and arrays by dtype and shape."""
    if isinstance(value, Tensor) and value.is_nested:
        return f"a NestedTensor of {value.dtype}"
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if getattr(value, "ndim", 0):
        return f"an array of {value.dtype} {list(value.shape)}"  # type: ignore[attr-defined]
    return repr(value)


# ---------------------------------------------------------------------------------------------------------- kinds


def check_kind(name: str, x: Any, *, fake: bool = False) -> None:
    """Refuse what is a tensor to Python and has no memory of its own kind. `fake`: shapes without numbers will do."""
    if type(x) is not Tensor and type(x) is not Parameter and isinstance(x, Tensor):
        for kind in (kind.__name__ for kind in type(x).__mro__):
            if kind in KINDS and not (fake and kind == "FakeTensor"):
                raise ArgumentError(f"{name} is a {kind}: {KINDS[kind]}")
    if isinstance(x, Tensor) and x.is_nested:
        raise ArgumentError(f"{name} is a NestedTensor: {KINDS['NestedTensor']}")


def check_real(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors, and readers of the program, that a call which computes at once cannot serve."""
    check_kind("q", q)
    check_kind("k", k)
    check_kind("v", v)
    if torch._C._are_functorch_transforms_active():
        raise NotBuilt("transforms of torch.func (grad, vmap, jvp, ...) of attention are not built; use torch.autograd")
    if torch._C._get_tracing_state() is not None:
        raise NotBuilt("torch.jit.trace of attention is not built; use torch.compile or torch.export")
    if torch._C._len_torch_dispatch_stack():
        _refuse_modes()
    if forward_ad._current_level >= 0:
        _refuse_tangents(q=q, k=k, v=v)


def _refuse_modes() -> None:
    """Of make_fx, and of fake tensors. Modes that only watch, such as a counter of operations, are welcome."""
    keys = torch._C._TorchDispatchModeKey
    if torch._C._get_dispatch_mode(keys.PROXY) is not None:
        raise NotBuilt("make_fx of attention is not built; use torch.compile or torch.export")
    if torch._C._get_dispatch_mode(keys.FAKE) is not None:
        raise ArgumentError("attention under a FakeTensorMode has no numbers; outside it, or in torch.compile, it has")


def _refuse_tangents(**tensors: Tensor) -> None:
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality):
        return  # below autograd, in the kernel of an operation or in inference mode, no tangent is to be seen
    for name, x in tensors.items():
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotBuilt(
                f"{name} has a tangent (torch.autograd.forward_ad): forward-mode derivatives of attention are not "
                "built; use backward"
            )


# ------------------------------------------------------------------------------------------------ shapes and dtypes


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ArgumentError(f"{name} must be [batch, n, heads, d], got shape {list(x.shape)}")
        if 0 in (x.shape[0], x.shape[2], x.shape[3]):
            raise ArgumentError(f"{name} needs a batch, heads and d of at least 1, got shape {list(x.shape)}")
        if x.dtype not in DTYPES:
            raise ArgumentError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.dtype != q.dtype:
            raise ArgumentError(f"q, k and v must have one dtype, but q is {q.dtype} and {name} {x.dtype}")
        if x.device != q.device:
            raise ArgumentError(f"q, k and v must be on one device, but q is on {q.device} and {name} on {x.device}")
        if x.layout != torch.strided or x.is_meta:
            raise ArgumentError(f"q, k and v must be dense tensors with numbers in them; {name} is {_where(x)}")
    if k.shape != v.shape:
        raise ArgumentError(f"k and v must have one shape, got {list(k.shape)} and {list(v.shape)}")
    if q.shape[0] != k.shape[0]:
        raise ArgumentError(f"q and k must have one batch size, got {q.shape[0]} and {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ArgumentError(f"q and k must have one head dimension d, got {q.shape[3]} and {k.shape[3]}")
    if q.shape[2] % k.shape[2]:
        raise ArgumentError(
            f"heads must be a multiple of kv_heads, got {q.shape[2]} and {k.shape[2]}"
            + (TRANSPOSE if k.shape[1] < k.shape[2] >= MANY_HEADS else "")
        )


def _where(x: Tensor) -> str:
    return "on device meta" if x.is_meta else str(x.layout)
