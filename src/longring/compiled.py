"""Attention as an operation that torch.compile and torch.export keep in their graphs.

A graph holds tensors and plain values, and may outlive the process that traced it: caches on disk and exported
programs are read by others. So a call is spelled out in the operation's arguments, as text that any process reads
alike, never as a key into something remembered here. Numbers stand apart from the text, since to a compiler they may
be symbols: one graph then serves many lengths, windows and offsets.

Where nothing is traced nobody needs the operation, and `ExactAttention` costs less.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from .autograd import Job, attended, differentiated, refuse_second_derivative
from .branches import Branch, ReleasedBranch
from .call import Options, check_tensors, prepare
from .errors import ArgumentError
from .geometry.patterns import Dense, Dilated, Pattern
from .kernels.contract import Upstream
from .numerics.online_softmax import accumulator_dtype
from .sharding import Sharding


def can_be_spelled(options: Options) -> bool:
    """Whether the call can become an operation: one that other ranks take part in is made at once."""
    shardings = (s for s in (options.sharding, options.kv_sharding) if isinstance(s, Sharding))
    return options.group is None and all(s.group is None for s in shardings)


def traced(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Options) -> tuple[Tensor, Tensor]:
    check_tensors(q, k, v)
    return _attention(q, k, v, *spelled_out(pattern, options))


# -------------------------------------------------------------------------------------------------- operations

CALL = "str call, SymInt[] whole, float[] real"


@custom_op(
    "longring::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {CALL}) -> (Tensor out, Tensor lse)",
)
def _attention(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    out, lse = attended(_job(q, k, v, *call), q, k, v)
    return out.contiguous(), lse


@_attention.register_fake
def _like_attention(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulator_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@custom_op(
    "longring::attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, {CALL})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
)
def _attention_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *call: Any
) -> tuple[Tensor, ...]:
    found = differentiated(_job(q, k, v, *call), Upstream(dout, dlse, out, lse), q, k, v)
    return tuple(gradient.contiguous() for gradient in found)


@_attention_backward.register_fake
def _like_attention_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *call: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.call = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)  # a gradient of lse that nobody has would cost a pass


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    return *_attention_backward(dout, dlse, out, lse, q, k, v, *ctx.call), *(None for _ in ctx.call)


def _second_derivative(ctx: Any, *gradients: Tensor | None) -> Any:
    refuse_second_derivative()


_attention.register_autograd(_gradients, setup_context=_keep)
_attention_backward.register_autograd(_second_derivative)


def _job(q: Tensor, k: Tensor, v: Tensor, call: str, whole: Sequence[int], real: Sequence[float]) -> Job:
    pattern, options = _read(call, tuple(whole), tuple(real))
    return prepare(q, k, v, pattern, options)


# --------------------------------------------------------------------------------------------- calls, as text

FIELDS = {
    **{kind: tuple(field.name for field in fields(kind)) for kind in (Dense, Dilated, Branch, ReleasedBranch)},
    Sharding: ("length", "layout"),  # one rank holds all there is
    Options: Options._fields,
}
KINDS = {kind.__name__: kind for kind in FIELDS}


def spelled_out(pattern: Pattern, options: Options) -> tuple[str, list[int], list[float]]:
    """A call as text, with its whole and its real numbers apart."""
    whole: list[int] = []
    real: list[float] = []
    return f"({_spelled(pattern, whole, real)}, {_spelled(options, whole, real)})", whole, real


def _spelled(value: Any, whole: list[int], real: list[float]) -> str:
    """The value as an expression in which i and r are the next whole and the next real number."""
    if type(value) in FIELDS:
        named = [f"{name}={_spelled(getattr(value, name), whole, real)}" for name in FIELDS[type(value)]]
        return f"{type(value).__name__}({', '.join(named)})"
    if isinstance(value, (tuple, list)):
        return "(" + "".join([_spelled(one, whole, real) + ", " for one in value]) + ")"
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, int):
        whole.append(value)
        return "i"
    if isinstance(value, float):
        real.append(value)
        return "r"
    raise ArgumentError(f"in compiled code every option is a plain value, got {value!r}")


@lru_cache(maxsize=256)
def _read(call: str, whole: tuple[int, ...], real: tuple[float, ...]) -> tuple[Pattern, Options]:
    return _value(ast.parse(call, mode="eval").body, {"i": iter(whole), "r": iter(real)})


def _value(node: ast.expr, numbers: dict[str, Iterator[Any]]) -> Any:
    match node:
        case ast.Name(id=kind):
            return next(numbers[kind])
        case ast.Tuple(elts=elements):
            return tuple(_value(one, numbers) for one in elements)
        case ast.Call(func=ast.Name(id=kind), keywords=named):
            return KINDS[kind](**{one.arg: _value(one.value, numbers) for one in named if one.arg})
    return ast.literal_eval(node)
