"""Attention over a pack of stacks in one launch, forward and backward, reading q, k, v where they lie.

Every stack is cut into *items*: a block of its query rows (forward, dq) or of its keys (dk, dv) that one program
computes alone. All items of all stacks are one list, so that LongNet's five branches, or a hundred documents, fill
the device together and nothing waits for the last block of a short stack. No program adds to what another writes:
the same input gives the same bits.

Shapes: q, out, dout [batch, n_q, heads, d]; k, v [batch, n_k, kv_heads, d]; lse, dlse [batch, heads, n_q]. Results are
those of the pack's trays, one after the other: [many, heads, rows, d] and [many, heads, rows].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import KernelRefusal
from ...geometry.packs import Pack, Tray, Trays
from ..places import Place, Stack
from ..shelf import Shelf
from ..tables import Tables

LARGEST_HEAD = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2E = math.log2(math.e)
FAR = 1 << 30  # a limit on b - a that no pair reaches


class Blocks(NamedTuple):
    """How one kernel cuts its work: `own` rows of a program, `other` rows it walks over at a time."""

    own: int
    other: int
    warps: int
    stages: int
    edge_stages: int = 1  # of the few blocks with a mask: registers saved there serve the many without


class Sizes(NamedTuple):
    forward: Blocks
    dq: Blocks
    dkv: Blocks


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pack: Pack,
    scale: float,
    *,
    dtype: torch.dtype | None = None,
    sizes: Sizes | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of each tray: out in `dtype` (default: the input's), lse float32, natural logarithm.

    Rows of a tray that no stack has are 0, with an lse of -inf.
    """
    _check(q, k, v)
    if not pack.stacks:
        return []
    q, k, v = (_dense_last(x) for x in (q, k, v))
    blocks = (sizes or sizes_for(q)).forward
    work = _work(q, pack, blocks, "rows")
    out = _numbers(pack.queries, q, dtype)
    lse = _logarithms(pack.queries, q)
    with _on(q.device):
        _forward[(work.count,)](
            q,
            k,
            v,
            out,
            lse,
            *work.tables.read(),
            scale2=abs(scale) * LOG2E,
            **_strides(q=q, k=k, v=v),
            **_constants(q, k, blocks, is_negative=scale < 0),
        )
    trays = pack.queries.trays
    return [(_on_tray(out, tray), _on_tray_by_head(lse, tray)) for tray in trays]


def backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pack: Pack,
    scale: float,
    *,
    dtype: torch.dtype | None = None,
    sizes: Sizes | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """dq, dk and dv, of each tray of theirs; dout, out, lse and dlse are those of whole rows, whatever a stack has."""
    _check(q, k, v)
    if not pack.stacks:
        return [], [], []
    q, k, v, dout, out = (_dense_last(x) for x in (q, k, v, dout, out))
    sizes = sizes or sizes_for(q)
    delta, log2 = _row_terms(dout, out, lse, dlse)
    dq, terms = _queries_backward(dout, delta, log2, q, k, v, pack, scale, dtype, sizes.dq)
    dk, dv = _keys_backward(dout, terms, q, k, v, pack, scale, dtype, sizes.dkv)
    of_queries, of_keys = pack.queries.trays, pack.keys.trays
    return (
        [_on_tray(dq, tray) for tray in of_queries],
        [_on_tray(dk, tray) for tray in of_keys],
        [_on_tray(dv, tray) for tray in of_keys],
    )


def _queries_backward(
    dout: Tensor,
    delta: Tensor,
    log2: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pack: Pack,
    scale: float,
    dtype: torch.dtype | None,
    blocks: Blocks,
) -> tuple[Tensor, Tensor]:
    """dq, and [2, rows] of delta and log2 put together as the stacks read them."""
    work = _work(q, pack, blocks, "rows")
    dq = _numbers(pack.queries, q, dtype)
    terms = torch.empty(2, work.padded, dtype=torch.float32, device=q.device)
    with _on(q.device):
        _dq[(work.count,)](
            q,
            k,
            v,
            dout,
            delta,
            log2,
            dq,
            terms,
            *work.tables.read(),
            padded=work.padded,
            scale2=scale * LOG2E,
            scale=scale,
            **_strides(q=q, k=k, v=v, do=dout, delta=delta.transpose(1, 2)),
            **_constants(q, k, blocks),
        )
    return dq, terms


def _keys_backward(
    dout: Tensor,
    terms: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pack: Pack,
    scale: float,
    dtype: torch.dtype | None,
    blocks: Blocks,
) -> tuple[Tensor, Tensor]:
    work = _work(q, pack, blocks, "keys")
    dk, dv = _numbers(pack.keys, q, dtype), _numbers(pack.keys, q, dtype)
    with _on(q.device):
        _dkv[(work.count,)](
            q,
            k,
            v,
            dout,
            terms,
            dk,
            dv,
            *work.tables.read(),
            padded=work.padded,
            scale2=scale * LOG2E,
            scale=scale,
            **_strides(q=q, k=k, v=v, do=dout),
            **_constants(q, k, blocks),
        )
    return dk, dv


def _row_terms(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """[batch, heads, n] float32 each: delta = rowsum(dout * out) - dlse, and lse as a logarithm to base 2."""
    batch, n, heads, d = out.shape
    delta, log2 = (torch.empty(batch, heads, n, dtype=torch.float32, device=out.device) for _ in range(2))
    slope = lse if dlse is None else dlse
    constants: dict[str, Any] = {"has_slope": dlse is not None, "d": d, "width": _width(d), "rows": ROWS_OF_TERMS}
    with _on(out.device):
        _terms[(batch * heads * -(-n // ROWS_OF_TERMS),)](
            dout,
            out,
            lse,
            slope,
            delta,
            log2,
            n=n,
            heads=heads,
            **_strides(do=dout, o=out, lse=lse.transpose(1, 2), slope=slope.transpose(1, 2)),
            **constants,
        )
    return delta, log2


# ------------------------------------------------------------------------------------------- what it accepts


def refusal(q: Tensor, k: Tensor) -> str | None:
    """Why these kernels cannot compute on such tensors, or None if they can."""
    if q.dtype not in DTYPES:
        return f"computes in bfloat16, float16 and float32, got {q.dtype}"
    if q.shape[-1] > LARGEST_HEAD:
        return f"takes a head dimension of at most {LARGEST_HEAD}, got {q.shape[-1]}"
    return None


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    why = refusal(q, k)
    if why:
        raise KernelRefusal(f"the triton kernel {why}; choose another kernel, or auto")
    assert k.shape == v.shape
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[2] % k.shape[2] == 0


def _dense_last(x: Tensor) -> Tensor:
    """Rows are read d elements at a time: an expanded gradient, as of out.sum(), has to be written out first."""
    return x if x.stride(-1) == 1 else x.contiguous()


# --------------------------------------------------------------------------------------------- block sizes

ROWS_OF_TERMS = 32

# 16-bit inputs, by the padded head dimension: what sm_90 holds in registers, nearly without spilling.
# benchmarks/triton_tiles.py --sweep compares others.
HOPPER = {
    64: Sizes(Blocks(128, 128, 8, 3), Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 3)),
    128: Sizes(Blocks(128, 128, 8, 3), Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 3)),
    256: Sizes(Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2), Blocks(64, 32, 8, 2)),
}
# fewer than 100 KiB of shared memory to a block must do
OLDER = {
    64: Sizes(Blocks(128, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    128: Sizes(Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 2), Blocks(64, 32, 4, 2)),
    256: Sizes(Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1)),
}
# no tensor cores: products in full float32
FLOAT32 = {
    64: Sizes(Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 8, 2)),
    128: Sizes(Blocks(32, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 8, 2)),
    256: Sizes(Blocks(32, 16, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1)),
}


def sizes_for(q: Tensor) -> Sizes:
    width = max(64, _width(q.shape[3]))
    if q.dtype == torch.float32:
        return FLOAT32[width]
    is_hopper = q.device.type == "cuda" and torch.cuda.get_device_capability(q.device)[0] in (9, 10)
    return HOPPER[width] if is_hopper else OLDER[width]


def _width(d: int) -> int:
    """The columns of a block: tensor cores take powers of two, 16 at least."""
    return max(16, 1 << (d - 1).bit_length())


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, whatever the tensors' is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _strides(**tensors: Tensor) -> dict[str, int]:
    """By batch row, row and head of each tensor [batch, n, heads, ...]: {"q_b": ..., "q_n": ..., "q_h": ...}.

    A single batch row gets 0: its stride is the length's, and kernels are specialised on whether 16 divides it.
    """
    strides = {name: (x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2)) for name, x in tensors.items()}
    return {
        f"{name}_{axis}": stride for name, three in strides.items() for axis, stride in zip("bnh", three, strict=True)
    }


def _constants(q: Tensor, k: Tensor, blocks: Blocks, **more: Any) -> dict[str, Any]:
    d = q.shape[3]
    return {
        "share": q.shape[2] // k.shape[2],
        "d": d,
        "width": _width(d),
        "own": blocks.own,
        "other": blocks.other,
        "edge_stages": blocks.edge_stages,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        **more,
    }


# ------------------------------------------------------------------------------------------- the work list


class Work(NamedTuple):
    """What the programs of a launch read instead of arguments."""

    tables: Tables  # int32 [count, 4], stack, which of its many, heads and blocks; int64 [stacks, FIELDS]
    count: int
    stacks: int
    padded: int  # rows of all stacks, each square's in steps of 16, so that vectors of them are read at once


# of a stack's fields: eight for each place; rows, cols, lo, hi, heads and first line; four for each berth
FIELDS: tl.constexpr = tl.constexpr(34)
SIZES: tl.constexpr = tl.constexpr(16)
OUT_BERTH: tl.constexpr = tl.constexpr(22)
LSE_BERTH: tl.constexpr = tl.constexpr(26)
KEY_BERTH: tl.constexpr = tl.constexpr(30)
LINES: tl.constexpr = tl.constexpr(16)

BYTES_KEPT = 64 << 20  # of tables on the device, and of what the host knows of their stacks
BYTES_OF_A_STACK = 1 << 11  # on the host, about

_shelf: Shelf[Work] = Shelf(BYTES_KEPT, lambda work: work.tables.bytes + work.stacks * BYTES_OF_A_STACK)


def _work(q: Tensor, pack: Pack, blocks: Blocks, side: str) -> Work:
    row_bytes = 2 * q.shape[3] * q.element_size()
    key = (q.device, pack, blocks.own, row_bytes, side)
    return _shelf.find(key, lambda: _written(q.device, pack, blocks.own, row_bytes, side))


def _written(device: torch.device, pack: Pack, own: int, row_bytes: int, side: str) -> Work:
    fields, lines = [], 0
    berths = zip(pack.queries.berths, pack.queries.berths_by_head, pack.keys.berths, strict=True)
    for stack, (of_out, of_lse, of_keys) in zip(pack.stacks, berths, strict=True):
        fields.append([*_fields(stack), lines, *of_out, *of_lse, *of_keys])
        squares, height = stack.queries.many * stack.queries.heads, len(stack.queries.rows)
        lines += squares * -(-height // LINES.value) * LINES.value
    items = _items(pack.stacks, own, row_bytes, side)
    table = torch.tensor(fields, dtype=torch.int64, device="cpu")  # whatever the default device is
    return Work(Tables([items, table], device), len(items), len(fields), lines)


def _fields(stack: Stack) -> list[int]:
    lo, hi = stack.limits
    limits = -FAR if lo is None else lo, FAR if hi is None else hi
    rows, cols = len(stack.queries.rows), len(stack.keys.rows)
    return [*_steps(stack.queries), *_steps(stack.keys), rows, cols, *limits, stack.queries.heads]


def _steps(place: Place) -> tuple[int, ...]:
    """First batch row, row and head; then batch rows and rows from one of the many to the next, rows and heads from
    one head to the next, and rows from one row to the next."""
    is_repeated = place.repeats > 1
    by_many = (0, place.spacing) if is_repeated else (place.batch.step, 0)
    head_step = place.kv_heads.step if place.share == 1 else 1
    first = (place.batch.start, place.rows.start, place.share * place.kv_heads.start)
    return (*first, *by_many, place.skew, head_step, place.rows.step)


def _other_length(stack: Stack, side: str) -> int:
    lo, hi = stack.limits
    seen = FAR if lo is None or hi is None else hi - lo + 1  # by a row: of more than these a block reads little
    if side == "rows":
        return min(len(stack.keys.rows), seen)
    return min(len(stack.queries.rows), seen) * stack.queries.share


SECTION_BYTES = 24 << 20  # what the items of a section read together stays in the L2 cache of a large GPU


def _items(stacks: Sequence[Stack], own: int, row_bytes: int, side: str) -> Tensor:
    """Items of the longest stacks first, so that no long item is left when all other programs have ended.

    Those of a stack come in sections: squares whose rows fit the cache together, in each the longest blocks first.
    """
    order = sorted(range(len(stacks)), key=lambda i: -_other_length(stacks[i], side))
    numbers = torch.tensor([_numbers_of_items(stacks[i], own, row_bytes, side) for i in order], device="cpu")
    counts = numbers[:, 0] * numbers[:, 1]
    each = torch.repeat_interleave(numbers, counts, dim=0)  # of all stacks at once: there may be a thousand
    squares, blocks, heads, at_once, is_longest_last = each.unbind(1)
    turn = torch.arange(len(each), device="cpu") - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    section = turn // (at_once * blocks)
    before = section * at_once
    block, square = _divided(turn - before * blocks, torch.minimum(at_once, squares - before))
    block = torch.where(is_longest_last.bool(), blocks - 1 - block, block)
    many, head = _divided(before + square, heads)
    stack = torch.repeat_interleave(torch.tensor(order, device="cpu"), counts)
    return torch.stack([stack, many, head, block], dim=1).to(torch.int32)


def _numbers_of_items(stack: Stack, own: int, row_bytes: int, side: str) -> tuple[int, ...]:
    """Squares, blocks of each, heads, squares of a section, and whether a square's longest block is its last."""
    place = stack.queries if side == "rows" else stack.keys
    squares = place.many * place.heads
    at_once = min(squares, max(1, SECTION_BYTES // (row_bytes * _other_length(stack, side))))
    if side == "rows":
        at_once *= place.share  # heads that read the same keys
    is_longest_last = stack.shape == ("causal" if side == "rows" else "flipped")
    return squares, -(-len(place.rows) // own), place.heads, at_once, is_longest_last


def _divided(x: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    quotient = x // by
    return quotient, x - quotient * by


# ------------------------------------------------------------------------------------------------- results


def _numbers(trays: Trays, q: Tensor, dtype: torch.dtype | None) -> Tensor:
    """[lines, d], 0 on trays that are not written all over."""
    made = torch.empty(trays.lines, q.shape[3], dtype=dtype or q.dtype, device=q.device)
    for tray in trays.trays:
        if not tray.is_full:
            made[tray.first : tray.first + tray.lines].zero_()
    return made


def _logarithms(trays: Trays, q: Tensor) -> Tensor:
    """[lines], -inf on trays that are not written all over."""
    made = torch.empty(trays.lines, dtype=torch.float32, device=q.device)
    for tray in trays.trays:
        if not tray.is_full:
            made[tray.first : tray.first + tray.lines].fill_(-torch.inf)
    return made


def _on_tray(x: Tensor, tray: Tray) -> Tensor:
    """[many, heads, rows, d]"""
    (many, heads, rows), part = tray.shape, x[tray.first : tray.first + tray.lines]
    if tray.is_shared:
        return part.view(many, rows, heads, -1).transpose(1, 2)
    return part.view(many, heads, rows, -1)


def _on_tray_by_head(x: Tensor, tray: Tray) -> Tensor:
    return x[tray.first : tray.first + tray.lines].view(tray.shape)


# --------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def _start(place, many, head, by_batch, by_row, by_head):
    """Offset of a square's first row in a tensor of these strides. In 64 bits: a million tokens pass 2**31."""
    batch = tl.load(place) + many * tl.load(place + 3)
    row = tl.load(place + 1) + many * tl.load(place + 4) + head * tl.load(place + 5)
    return batch * by_batch + row * by_row + (tl.load(place + 2) + head * tl.load(place + 6)) * by_head


@triton.jit
def _line(own_fields, many, head, rows):
    """Where the terms of a square's rows begin."""
    square = many * tl.load(own_fields + 4) + head
    return (tl.load(own_fields + 5) // LINES + square * tl.cdiv(rows, LINES)) * LINES  # so written, plainly a multiple


@triton.jit
def _limits(first, own: tl.constexpr, mine, theirs, lo, hi, other: tl.constexpr):
    """(begin, free from, free to, end): which of the others rows first.. meet, and where each meets all.

    Row a meets b where lo <= b - a <= hi. begin and both free bounds are multiples of `other`, and where nothing is
    free all three are begin.
    """
    last = tl.minimum(first + own, mine) - 1
    begin = tl.maximum(first + lo, 0) // other * other
    end = tl.minimum(last + hi + 1, theirs)
    free_from = tl.cdiv(tl.maximum(last + lo, 0), other) * other
    free_to = tl.maximum(tl.minimum(first + hi + 1, theirs), 0) // other * other
    has_free = free_from < free_to
    return begin, tl.where(has_free, free_from, begin), tl.where(has_free, free_to, begin), end


@triton.jit
def _edge(i, begin, free_from, free_to, other: tl.constexpr):
    """Where the i-th block that is not free starts: those before the free ones, then those after."""
    before = (free_from - begin) // other
    return tl.where(i < before, begin + i * other, free_to + (i - before) * other)


@triton.jit
def _edges(begin, free_from, free_to, end, other: tl.constexpr):
    return (free_from - begin) // other + tl.cdiv(tl.maximum(end - free_to, 0), other)


@triton.jit
def _rows(pointer, by_row, first, most, d: tl.constexpr, width: tl.constexpr, size: tl.constexpr, whole: tl.constexpr):
    """[size, width] from row `first` on; zero beyond row `most`, unless all are there, and beyond column d."""
    rows, cols = tl.arange(0, size).to(tl.int64), tl.arange(0, width)
    pointers = pointer + first * by_row + (rows[:, None] * by_row + cols[None, :])
    if whole:
        return tl.load(pointers) if d == width else tl.load(pointers, mask=cols[None, :] < d, other=0.0)
    mask = (first + rows < most)[:, None]
    return tl.load(pointers, mask=mask if d == width else mask & (cols[None, :] < d), other=0.0)


@triton.jit
def _berth(berth, many, head, rows):
    """Lines of a square's rows."""
    first = tl.load(berth) + many * tl.load(berth + 1) + head * tl.load(berth + 2)
    return first + rows * tl.load(berth + 3)


@triton.jit
def _write(pointer, x, berth, many, head, first, most, d: tl.constexpr, width: tl.constexpr, size: tl.constexpr):
    """x [size, width] where the square's rows from `first` on belong."""
    rows, cols = first + tl.arange(0, size), tl.arange(0, width)
    pointers = pointer + _berth(berth, many, head, rows)[:, None] * d + cols[None, :]
    tl.store(pointers, x.to(pointer.dtype.element_ty), mask=(rows < most)[:, None] & (cols < d)[None, :])


# Triton compiles a kernel again for each integer that 16 divides, or does not: nothing that follows from a length is
# specialised so. Strides of rows and heads are, since how many bytes a thread may load at once hangs on them.
@triton.jit(do_not_specialize=["lse_b", "lse_h", "slope_b", "slope_h", "n", "heads"])
def _terms(
    DO,
    OUT,
    LSE,
    SLOPE,
    DELTA,
    LOG2,
    do_b,
    do_n,
    do_h,
    o_b,
    o_n,
    o_h,
    lse_b,
    lse_h,
    lse_n,
    slope_b,
    slope_h,
    slope_n,
    n,
    heads,
    has_slope: tl.constexpr,
    d: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
):
    blocks = tl.cdiv(n, rows)
    line = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = line // heads, line % heads
    first = (tl.program_id(0) % blocks * rows).to(tl.int64)
    dout = _rows(DO + b * do_b + h * do_h, do_n, first, n, d, width, rows, False)
    out = _rows(OUT + b * o_b + h * o_h, o_n, first, n, d, width, rows, False)
    at = first + tl.arange(0, rows)
    is_row = at < n
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    if has_slope:
        delta -= tl.load(SLOPE + b * slope_b + h * slope_h + at * slope_n, mask=is_row, other=0.0).to(tl.float32)
    lse = tl.load(LSE + b * lse_b + h * lse_h + at * lse_n, mask=is_row, other=0.0)
    # a row that saw nothing: +inf makes every weight of it 0, where -inf would make it +inf
    log2 = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634).to(tl.float32)
    tl.store(DELTA + line * n + at, delta, mask=is_row)
    tl.store(LOG2 + line * n + at, log2, mask=is_row)


# ------------------------------------------------------------------------------------------------- forward


@triton.jit
def _forward(
    Q,
    K,
    V,
    OUT,
    LSE,
    ITEMS,
    FIELDS_OF,
    q_b,
    q_n,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    scale2,
    is_negative: tl.constexpr,
    share: tl.constexpr,
    d: tl.constexpr,
    width: tl.constexpr,
    own: tl.constexpr,
    other: tl.constexpr,
    edge_stages: tl.constexpr,
):
    item = ITEMS + tl.program_id(0) * 4
    many, head, first = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3) * own
    queries = FIELDS_OF + tl.load(item) * FIELDS
    keys, own_fields = queries + 8, queries + SIZES
    mine, theirs = tl.load(own_fields).to(tl.int32), tl.load(own_fields + 1).to(tl.int32)
    lo, hi = tl.load(own_fields + 2).to(tl.int32), tl.load(own_fields + 3).to(tl.int32)

    Q += _start(queries, many, head, q_b, q_n, q_h)
    K += _start(keys, many, head // share, k_b, k_n, k_h)
    V += _start(keys, many, head // share, v_b, v_n, v_h)
    k_row, v_row = tl.load(keys + 7) * k_n, tl.load(keys + 7) * v_n

    q = _rows(Q, tl.load(queries + 7) * q_n, first, mine, d, width, own, False)
    if is_negative:  # into q, exactly: a row's largest score is then the largest product, as for a scale above 0
        q = (-q.to(tl.float32)).to(q.dtype)
    acc = tl.zeros([own, width], tl.float32)
    most = tl.full([own], float("-inf"), tl.float32)
    total = tl.zeros([own], tl.float32)
    rows = first + tl.arange(0, own)
    cols = tl.arange(0, other)

    begin, free_from, free_to, end = _limits(first, own, mine, theirs, lo, hi, other)
    for start in tl.range(free_from, free_to, other):
        k = _rows(K, k_row, start, theirs, d, width, other, True)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        highest = tl.maximum(most, tl.max(products, 1) * scale2)
        p = tl.exp2(products * scale2 - highest[:, None])
        fade = tl.exp2(most - highest)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        v = _rows(V, v_row, start, theirs, d, width, other, True)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        most = highest

    for i in tl.range(0, _edges(begin, free_from, free_to, end, other), num_stages=edge_stages):
        start = _edge(i, begin, free_from, free_to, other)
        k = _rows(K, k_row, start, theirs, d, width, other, False)
        v = _rows(V, v_row, start, theirs, d, width, other, False)
        gap = (start + cols)[None, :] - rows[:, None]
        meets = (gap >= lo) & (gap <= hi) & (start + cols < theirs)[None, :]
        # masked after the scale: -inf times a scale of 0 would be nan
        scores = tl.where(meets, tl.dot(q, tl.trans(k), input_precision="ieee") * scale2, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        origin = tl.where(highest == float("-inf"), 0.0, highest)  # a row that met nothing yet
        p = tl.exp2(scores - origin[:, None])
        fade = tl.exp2(most - origin)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        most = highest

    has_met = total != 0  # nan has met something: with an lse of -inf it would be lost when parts are merged
    acc = acc / tl.where(has_met, total, 1.0)[:, None]
    lse = tl.where(has_met, most + tl.log2(tl.where(has_met, total, 1.0)), float("-inf")) * 0.6931471805599453
    _write(OUT, acc, queries + OUT_BERTH, many, head, first, mine, d, width, own)
    tl.store(LSE + _berth(queries + LSE_BERTH, many, head, rows), lse, mask=rows < mine)


# ------------------------------------------------------------------------------------------------ backward


@triton.jit(do_not_specialize=["delta_b", "delta_h"])
def _dq(
    Q,
    K,
    V,
    DO,
    DELTA,
    LOG2,
    DQ,
    TERMS,
    ITEMS,
    FIELDS_OF,
    q_b,
    q_n,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    do_b,
    do_n,
    do_h,
    delta_b,
    delta_n,
    delta_h,
    padded,
    scale2,
    scale,
    share: tl.constexpr,
    d: tl.constexpr,
    width: tl.constexpr,
    own: tl.constexpr,
    other: tl.constexpr,
    edge_stages: tl.constexpr,
):
    item = ITEMS + tl.program_id(0) * 4
    many, head, first = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3) * own
    queries = FIELDS_OF + tl.load(item) * FIELDS
    keys, own_fields = queries + 8, queries + SIZES
    mine, theirs = tl.load(own_fields).to(tl.int32), tl.load(own_fields + 1).to(tl.int32)
    lo, hi = tl.load(own_fields + 2).to(tl.int32), tl.load(own_fields + 3).to(tl.int32)

    Q += _start(queries, many, head, q_b, q_n, q_h)
    DO += _start(queries, many, head, do_b, do_n, do_h)
    at = _start(queries, many, head, delta_b, delta_n, delta_h)
    K += _start(keys, many, head // share, k_b, k_n, k_h)
    V += _start(keys, many, head // share, v_b, v_n, v_h)
    apart = tl.load(queries + 7)
    k_row, v_row = tl.load(keys + 7) * k_n, tl.load(keys + 7) * v_n

    q = _rows(Q, apart * q_n, first, mine, d, width, own, False)
    dout = _rows(DO, apart * do_n, first, mine, d, width, own, False)
    rows = first + tl.arange(0, own)
    delta = tl.load(DELTA + at + rows * apart * delta_n, mask=rows < mine, other=0.0)
    log2 = tl.load(LOG2 + at + rows * apart * delta_n, mask=rows < mine, other=float("inf"))
    line = _line(own_fields, many, head, mine) + first + tl.arange(0, own)
    tl.store(TERMS + line, delta, mask=rows < mine)
    tl.store(TERMS + padded + line, log2, mask=rows < mine)
    acc = tl.zeros([own, width], tl.float32)
    cols = tl.arange(0, other)

    begin, free_from, free_to, end = _limits(first, own, mine, theirs, lo, hi, other)
    for start in tl.range(free_from, free_to, other):
        k = _rows(K, k_row, start, theirs, d, width, other, True)
        v = _rows(V, v_row, start, theirs, d, width, other, True)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale2 - log2[:, None])
        ds = p * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")

    for i in tl.range(0, _edges(begin, free_from, free_to, end, other), num_stages=edge_stages):
        start = _edge(i, begin, free_from, free_to, other)
        k = _rows(K, k_row, start, theirs, d, width, other, False)
        v = _rows(V, v_row, start, theirs, d, width, other, False)
        gap = (start + cols)[None, :] - rows[:, None]
        meets = (gap >= lo) & (gap <= hi) & (start + cols < theirs)[None, :]
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale2 - log2[:, None])
        ds = p * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
        acc = tl.dot(tl.where(meets, ds, 0.0).to(k.dtype), k, acc, input_precision="ieee")

    _write(DQ, acc * scale, queries + OUT_BERTH, many, head, first, mine, d, width, own)


@triton.jit
def _dkv(
    Q,
    K,
    V,
    DO,
    TERMS,
    DK,
    DV,
    ITEMS,
    FIELDS_OF,
    q_b,
    q_n,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    do_b,
    do_n,
    do_h,
    padded,
    scale2,
    scale,
    share: tl.constexpr,
    d: tl.constexpr,
    width: tl.constexpr,
    own: tl.constexpr,
    other: tl.constexpr,
    edge_stages: tl.constexpr,
):
    item = ITEMS + tl.program_id(0) * 4
    many, kv_head, first = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3) * own
    queries = FIELDS_OF + tl.load(item) * FIELDS
    keys, own_fields = queries + 8, queries + SIZES
    theirs, mine = tl.load(own_fields).to(tl.int32), tl.load(own_fields + 1).to(tl.int32)
    # seen from the keys: row a of theirs meets b where -hi <= a - b <= -lo
    lo, hi = -tl.load(own_fields + 3).to(tl.int32), -tl.load(own_fields + 2).to(tl.int32)

    k_row, v_row = tl.load(keys + 7) * k_n, tl.load(keys + 7) * v_n
    k = _rows(K + _start(keys, many, kv_head, k_b, k_n, k_h), k_row, first, mine, d, width, own, False)
    v = _rows(V + _start(keys, many, kv_head, v_b, v_n, v_h), v_row, first, mine, d, width, own, False)
    apart = tl.load(queries + 7)
    q_row, do_row = apart * q_n, apart * do_n
    dk = tl.zeros([own, width], tl.float32)
    dv = tl.zeros([own, width], tl.float32)
    rows = first + tl.arange(0, own)
    cols = tl.arange(0, other)

    begin, free_from, free_to, end = _limits(first, own, mine, theirs, lo, hi, other)
    for i in range(share):  # every query head of a kv head adds to its gradient
        head = kv_head * share + i
        q_from = Q + _start(queries, many, head, q_b, q_n, q_h)
        do_from = DO + _start(queries, many, head, do_b, do_n, do_h)
        delta_from = TERMS + _line(own_fields, many, head, theirs)
        log2_from = delta_from + padded

        for start in tl.range(free_from, free_to, other):
            q = _rows(q_from, q_row, start, theirs, d, width, other, True)
            log2 = tl.load(log2_from + start + cols)
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale2 - log2[None, :])
            dout = _rows(do_from, do_row, start, theirs, d, width, other, True)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
            delta = tl.load(delta_from + start + cols)
            ds = p * (tl.dot(v, tl.trans(dout), input_precision="ieee") - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")

        for j in tl.range(0, _edges(begin, free_from, free_to, end, other), num_stages=edge_stages):
            start = _edge(j, begin, free_from, free_to, other)
            q = _rows(q_from, q_row, start, theirs, d, width, other, False)
            is_row = start + cols < theirs
            log2 = tl.load(log2_from + start + cols, mask=is_row, other=float("inf"))  # no row, no weight
            gap = (start + cols)[None, :] - rows[:, None]
            meets = (gap >= lo) & (gap <= hi)
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale2 - log2[None, :])
            p = tl.where(meets, p, 0.0)
            dout = _rows(do_from, do_row, start, theirs, d, width, other, False)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
            delta = tl.load(delta_from + start + cols, mask=is_row, other=0.0)
            ds = p * (tl.dot(v, tl.trans(dout), input_precision="ieee") - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")

    _write(DK, dk * scale, queries + KEY_BERTH, many, kv_head, first, mine, d, width, own)
    _write(DV, dv, queries + KEY_BERTH, many, kv_head, first, mine, d, width, own)
