"""The one place where autograd meets a schedule."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from .errors import NotBuilt
from .geometry.layouts import Shard
from .kernels.contract import Gradients, Upstream
from .numerics.online_softmax import Partial, accumulator_dtype
from .schedules.gather import collect, take_rows
from .transport.contract import Transport

T = TypeVar("T")


class Job(Protocol):
    """A computation and its backward: one rank's part of a schedule, or all ranks played at once."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Partial: ...

    def backward(self, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor) -> Gradients: ...


class ExactAttention(torch.autograd.Function):
    """(out, lse), both differentiable."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, job: Job) -> tuple[Tensor, Tensor]:
        out, lse = attended(job, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.job = job
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        with torch.no_grad():
            dout = torch.zeros_like(out) if dout is None else dout
            gradients = differentiated(ctx.job, Upstream(dout, dlse, out, lse), q, k, v)
        if torch.is_grad_enabled():  # create_graph=True: what depends on q, k and v must not pass for constant
            gradients = OnlyOnce.apply(*gradients, q, k, v)
        return *gradients, None


def attended(job: Job, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse), each in memory of its own."""
    with _full_precision(q):
        total = job.forward(q, k, v)
    out, lse = total.out.to(q.dtype), total.lse.to(accumulator_dtype(q.dtype))  # rounded once, here
    return _as_its_own(out), _as_its_own(lse.contiguous())


def differentiated(job: Job, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in their dtypes."""
    with _full_precision(q):
        dq, dk, dv = (g.to(x.dtype) for g, x in zip(job.backward(upstream, q, k, v), (q, k, v), strict=True))
    # autograd would silently sum a gradient of another shape
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    return dq, dk, dv


def _as_its_own(x: Tensor) -> Tensor:
    """The same memory, not seen as a view of it: autograd refuses to write into views that a function returns."""
    if not x._is_view():
        return x
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
    )


def not_compiled(function: Callable[..., T]) -> Callable[..., T]:
    """The function as it is, which torch.compile then leaves alone: plans and messages are not for tracing.

    Where nobody has loaded the compiler nobody compiles, and loading it takes seconds.
    """
    return _disable_dynamo(function) if "torch._dynamo" in sys.modules else function


class OnlyOnce(torch.autograd.Function):
    """Gradients that refuse to be differentiated, which nothing computes, instead of passing for constants."""

    @staticmethod
    def forward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, *depends_on: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dq.clone(), dk.clone(), dv.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        refuse_second_derivative()


def refuse_second_derivative() -> NoReturn:
    raise NotBuilt("create_graph=True: the second derivative of attention is not built")


def _full_precision(q: Tensor) -> AbstractContextManager[object]:
    """Autocast would run matrix products in 16 bits that are meant to be in the accumulator's dtype."""
    return torch.autocast(q.device.type, enabled=False) if torch.is_autocast_enabled(q.device.type) else nullcontext()


class Others(NamedTuple):
    """The ranks that hold the other rows, and how long to wait for them."""

    transport: Transport
    shards: tuple[Shard, ...]
    dim: int  # of tokens, in the caller's tensor
    timeout: float | None


class TakeShard(torch.autograd.Function):
    """A rank's rows of a tensor that every rank has; its backward gathers, so that every rank has the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, others: Others | None, shard: Shard) -> Tensor:
        ctx.others = others
        return take_rows(x, shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _whole(gradient, ctx.others, "gradient of shard"), None, None


class GatherShards(torch.autograd.Function):
    """The whole tensor from every rank's rows; its backward takes the rank's own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, others: Others | None, shard: Shard) -> Tensor:
        ctx.shard = shard
        return _whole(x, others, "unshard")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return take_rows(gradient, ctx.shard), None, None


def _whole(x: Tensor, others: Others | None, what: str) -> Tensor:
    if others is None:
        return x.clone()
    shape = [*x.shape[:1], *x.shape[2:]]
    terms = {
        "call": what,
        "dtype": x.dtype,
        "device": x.device.type,
        "dim": others.dim,
        "shape of a token": shape,
        "how tokens are dealt": others.shards,
    }
    with others.transport.converse(terms, timeout=others.timeout) as talk:
        return collect(others.transport, talk, [x], others.shards, what=what)[0]
