"""The one place where autograd meets a schedule."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .errors import NotBuilt
from .geometry.layouts import Shard
from .kernels.contract import Gradients, Upstream
from .numerics.online_softmax import Partial, accumulator_dtype
from .schedules.gather import collect, take_rows
from .transport.contract import Transport


class Job(Protocol):
    """A computation and its backward: one rank's part of a schedule, or all ranks played at once."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Partial: ...

    def backward(self, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor) -> Gradients: ...


class ExactAttention(torch.autograd.Function):
    """(out, lse), both differentiable."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, job: Job) -> tuple[Tensor, Tensor]:
        with _full_precision(q):
            total = job.forward(q, k, v)
        out, lse = total.out.to(q.dtype), total.lse.to(accumulator_dtype(q.dtype))  # rounded once, here
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.job = job
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        with torch.no_grad(), _full_precision(q):
            dout = torch.zeros_like(out) if dout is None else dout
            found = ctx.job.backward(Upstream(dout, dlse, out, lse), q, k, v)
            gradients = tuple(g.to(x.dtype) for g, x in zip(found, (q, k, v), strict=True))
        # autograd would silently sum a gradient of another shape
        assert all(g.shape == x.shape for g, x in zip(gradients, (q, k, v), strict=True))
        if torch.is_grad_enabled():  # create_graph=True: what depends on q, k and v must not pass for constant
            gradients = OnlyOnce.apply(*gradients, q, k, v)
        return *gradients, None


class OnlyOnce(torch.autograd.Function):
    """Gradients that refuse to be differentiated, which nothing computes, instead of passing for constants."""

    @staticmethod
    def forward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, *depends_on: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dq.clone(), dk.clone(), dv.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise NotBuilt("create_graph=True: the second derivative of attention is not built")


def _full_precision(q: Tensor) -> AbstractContextManager[object]:
    """Autocast would run matrix products in 16 bits that are meant to be in the accumulator's dtype."""
    return torch.autocast(q.device.type, enabled=False) if torch.is_autocast_enabled(q.device.type) else nullcontext()


class TakeShard(torch.autograd.Function):
    """A rank's rows of a tensor that every rank has; its backward gathers, so that every rank has the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transport: Transport | None, shards: tuple[Shard, ...], rank: int) -> Tensor:
        ctx.transport, ctx.shards = transport, shards
        return take_rows(x, shards[rank])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _whole(gradient, ctx.transport, ctx.shards, "gradient of shard"), None, None, None


class GatherShards(torch.autograd.Function):
    """The whole tensor from every rank's rows; its backward takes the rank's own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transport: Transport | None, shards: tuple[Shard, ...], rank: int) -> Tensor:
        ctx.shard = shards[rank]
        return _whole(x, transport, shards, "unshard")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return take_rows(gradient, ctx.shard), None, None, None


def _whole(x: Tensor, transport: Transport | None, shards: tuple[Shard, ...], what: str) -> Tensor:
    if transport is None:
        return x.clone()
    terms = {"call": what, "dtype": x.dtype, "shape": [*x.shape[:1], *x.shape[2:]], "how tokens are dealt": shards}
    with transport.converse(terms) as talk:
        return collect(transport, talk, [x], shards, what=what)[0]
