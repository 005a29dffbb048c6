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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.library import CustomOpDef, custom_op

from .autograd import Job, attended, differentiated, refuse_second_derivative
from .branches import Branch, ReleasedBranch
from .call import Options, is_replicated, prepare
from .errors import ArgumentError
from .geometry.head_split import HeadSplit
from .geometry.patterns import Dense, Dilated, PaddingApart, Pattern, Table, tables_of
from .kernels.contract import Upstream
from .numerics.online_softmax import accumulator_dtype
from .sharding import Sharding
from .tensors import check_kind, check_tensors
from .transport.alone import Alone
from .transport.process_group import ProcessGroupTransport
from .transport.select import transport_named


def can_be_spelled(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Options) -> bool:
    """Whether the call can become an operation; one that cannot is made at once, and breaks the graph."""
    shardings = [s for s in (options.sharding, options.kv_sharding) if isinstance(s, Sharding)]
    if options.group is not None or (isinstance(pattern, Pattern) and type(pattern) not in NAMED):
        return False
    if is_replicated(options.sharding):  # keys grow with every call, and so would the graphs in number
        return False
    if all(isinstance(s.transport, Alone) for s in shardings):
        return True
    if _is_inside_a_region() or not all(isinstance(s.transport, ProcessGroupTransport) for s in shardings):
        return False
    # the others hear of a mistake when the call is made: while it is traced nobody listens
    return all(isinstance(x, Tensor) and x.ndim == 4 for x in (q, k, v))


@torch.compiler.assume_constant_result
def _is_inside_a_region() -> bool:
    """Whether the compiler reads the body of a checkpoint, a condition or a loop, which may run twice or not at all.

    PyTorch (2.13) fails to recompute what has an effect.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        reader = InstructionTranslator.current_tx()
    except AttributeError:  # nobody reads: torch.export runs the code itself
        return False
    return reader.output.current_tracer.parent is not None


def traced(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Options) -> tuple[Tensor, Tensor]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_kind(name, x, fake=True)
    if isinstance(options.sharding, Sharding) and not isinstance(options.sharding.transport, Alone):
        return OVER_RANKS.forward(q, k, v, *spelled_out(pattern, options))
    check_tensors(q, k, v)
    return HERE.forward(q, k, v, *spelled_out(pattern, options))


# -------------------------------------------------------------------------------------------------- operations


def _forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    out, lse = attended(_job(q, k, v, *call), q, k, v)
    return out.contiguous(), lse


def _like_forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulator_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *call: Any
) -> tuple[Tensor, ...]:
    found = differentiated(_job(q, k, v, *call), Upstream(dout, dlse, out, lse), q, k, v)
    return tuple(gradient.contiguous() for gradient in found)


def _like_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *call: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _job(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: str,
    whole: Sequence[int],
    real: Sequence[float],
    documents: Tensor | None,
    lengths: Tensor | None,
) -> Job:
    read = _read if RANKS in call else _read_once
    return prepare(q, k, v, *read(call, tuple(whole), tuple(real), _numbers(documents), _numbers(lengths)))


def _numbers(table: Tensor | None) -> tuple[Any, ...] | None:
    if table is None:
        return None
    rows = table.tolist()
    return tuple(tuple(row) if isinstance(row, list) else row for row in rows)


class Operations(NamedTuple):
    """Attention and its backward, as the dispatcher knows them."""

    forward: CustomOpDef
    backward: CustomOpDef


CALL = "str call, SymInt[] whole, float[] real, Tensor? documents, Tensor? lengths"
TAKES = f"(Tensor q, Tensor k, Tensor v, {CALL}) -> (Tensor out, Tensor lse)"
TAKES_BACK = (
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, {CALL})"
    " -> (Tensor dq, Tensor dk, Tensor dv)"
)


def _operations(name: str) -> Operations:
    # a captured CUDA graph would repeat the launches, but neither the messages nor the choices made on the host
    kind = {"mutates_args": (), "tags": (torch.Tag.cudagraph_unsafe,)}
    forward = custom_op(f"longring::{name}", _forward, schema=TAKES, **kind)
    backward = custom_op(f"longring::{name}_backward", _backward, schema=TAKES_BACK, **kind)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *ctx.call, documents, lengths = inputs
        ctx.save_for_backward(q, k, v, *output, documents, lengths)
        ctx.set_materialize_grads(False)  # a gradient of lse that nobody has would cost a pass

    def gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *tables = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        call = (*ctx.call, *tables)
        return *backward(dout, dlse, out, lse, q, k, v, *call), *(None for _ in call)

    def second_derivative(ctx: Any, *gradients: Tensor | None) -> Any:
        refuse_second_derivative()

    forward.register_fake(_like_forward)
    backward.register_fake(_like_backward)
    forward.register_autograd(gradients, setup_context=keep)
    backward.register_autograd(second_derivative)
    return Operations(forward, backward)


HERE = _operations("attention")
OVER_RANKS = _operations("attention_over_ranks")
for _operation in OVER_RANKS:  # which every rank takes part in, in the same order, whether it needs the result or not
    _operation.register_effect(EffectType.ORDERED)


# --------------------------------------------------------------------------------------------- calls, as text

RANKS = "Ranks"
PATTERNS = (Dense, Dilated, HeadSplit, Branch, ReleasedBranch)
NAMED = {
    **{kind: tuple(field.name for field in fields(kind) if field.init) for kind in (*PATTERNS, PaddingApart)},
    Options: Options._fields,
}
KINDS = {**{kind.__name__: kind for kind in (*NAMED, Sharding, range)}, RANKS: transport_named}


def spelled_out(pattern: Pattern, options: Options) -> tuple[str, list[int], list[float], Any, Any]:
    """A call as text, with its whole and its real numbers apart, and the tables of the pattern."""
    whole: list[int] = []
    real: list[float] = []
    documents, lengths = tables_of(pattern)
    return f"({_spelled(pattern, whole, real)}, {_spelled(options, whole, real)})", whole, real, documents, lengths


def _spelled(value: Any, whole: list[int], real: list[float]) -> str:
    """The value as an expression in which i and r are the next whole and the next real number."""
    if isinstance(value, Sharding):
        return _spelled_sharding(value, whole, real)
    if type(value) in NAMED:
        named = [f"{name}={_spelled_field(value, name, whole, real)}" for name in NAMED[type(value)]]
        return f"{type(value).__name__}({', '.join(named)})"
    if isinstance(value, (tuple, list)):
        return "(" + "".join([_spelled(one, whole, real) + ", " for one in value]) + ")"
    if isinstance(value, range):
        return "range" + _spelled((value.start, value.stop, value.step), whole, real)
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, (int, torch.SymInt)):
        whole.append(value)  # type: ignore[arg-type]
        return "i"
    if isinstance(value, float):
        real.append(value)
        return "r"
    raise ArgumentError(f"in compiled code every option is a plain value, got one of type {type(value).__name__}")


def _spelled_field(value: Any, name: str, whole: list[int], real: list[float]) -> str:
    field = getattr(value, name)
    return name if isinstance(field, Table) else _spelled(field, whole, real)


def _spelled_sharding(s: Sharding, whole: list[int], real: list[float]) -> str:
    length = _spelled(s.length, whole, real)
    ranks = _spelled_ranks(s.transport, whole, real)
    shards = s.shards if s.layout == "ranges" else ()  # others are dealt anew
    others = [_spelled(one, whole, real) for one in (s.layout, s.documents, s.align, s.pattern, shards)]
    return f"Sharding({', '.join([length, ranks, *others])})"


def _spelled_ranks(transport: Any, whole: list[int], real: list[float]) -> str:
    if isinstance(transport, Alone):
        return "None"
    # as the transport has it: a compiler takes a group's own name for granted, and would not see that it changed
    return RANKS + _spelled((transport.group_name, transport.node_ranks), whole, real)


def _read(call: str, whole: tuple[int, ...], real: tuple[float, ...], documents: Any, lengths: Any) -> Any:
    """(pattern, options)"""
    tables = {"documents": iter([documents]), "lengths": iter([lengths])}
    return _value(_parsed(call), {"i": iter(whole), "r": iter(real), **tables})


_read_once = lru_cache(maxsize=256)(_read)  # not what names ranks: groups end, and others get their names


@lru_cache(maxsize=256)
def _parsed(call: str) -> ast.expr:
    return ast.parse(call, mode="eval").body


def _value(node: ast.expr, numbers: dict[str, Iterator[Any]]) -> Any:
    match node:
        case ast.Name(id=kind):
            return next(numbers[kind])
        case ast.Tuple(elts=elements):
            return tuple(_value(one, numbers) for one in elements)
        case ast.Call(func=ast.Name(id=kind), args=given, keywords=named):
            values = [_value(one, numbers) for one in given]
            return KINDS[kind](*values, **{one.arg: _value(one.value, numbers) for one in named if one.arg})
    return ast.literal_eval(node)
