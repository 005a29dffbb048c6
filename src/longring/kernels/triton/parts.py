"""Many partial results into one tensor in one pass: the merge of a forward, the sum of a backward.

A fused operation leaves its results compact, [many, heads, rows, d], and a `Place` says which rows of the whole tensor
they are. Each program owns a few rows of one head of the target, asks every part which of them it holds, and writes
each of them once: however many parts there are, the target is read and written a single time.

What a program needs to know of the parts are integers, kept on the device in three tables: how each part is laid out,
where each head of the target is seated in it, and which parts a head's rows are in at all.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# (to a type checker a kernel is Python that never returns; it is Triton's compiler that reads it)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...geometry.portions import MERGED_AT_ONCE
from ...numerics.online_softmax import Partial, accumulator_dtype
from ..places import Part, Place
from ..tables import Tables

FARTHEST = 64  # rows from one of a program's to the next

# d, padded to a power of two -> (rows of a program, its warps): 16 numbers a thread leave many programs room
BLOCKS = {16: (128, 4), 32: (64, 4), 64: (64, 4), 128: (32, 4), 256: (8, 4), 512: (4, 4), 1024: (2, 4)}
MERGING = {**BLOCKS, 64: (32, 4), 128: (32, 8)}  # of a merge, which computes more than a sum: seen to be faster so

FAR = 2**31 - 1  # no row is beyond it: rows are counted in 32 bits, numbers in 64


def merge_parts(
    parts: Sequence[Part], window: range, before: Partial | None, into: Partial, *, is_first_at_home: bool = False
) -> None:
    """What `before` and all parts saw together, for the rows of `window`; `into` may be `before`.

    `is_first_at_home`: the first part's `out` is the very memory of `into` where its rows belong, so that rows which no
    other part has are left as they are.

    Rows that nobody saw become 0 with lse -inf. Logarithms are weighed in float64 if `before` or `into` carries them
    so; products are float32, or float64 for parts of float64. Parts beyond MERGED_AT_ONCE are merged in rounds: through
    `into` if it is an accumulator, or `before`, which then is used up, or one of their own. So a 16-bit `into` is
    rounded once, however many they are.
    """
    into = _cut(into, window)
    before = None if before is None else _cut(before, window)
    *rounds, last = _rounds(parts)
    between = into
    if rounds:
        between = before or Partial(_unrounded(into.out), _like(into.lse, torch.float64))
    for some in rounds:
        _merge_round(some, window.start, before, between)
        before = between
    _merge_round(last, window.start, before, into, at_home=is_first_at_home and before is None)


def add_parts(
    parts: Sequence[Part], window: range, before: Tensor | None, into: Tensor, *, is_first_at_home: bool = False
) -> None:
    """`before` and all parts added up, for the rows of `window`; `into` may be `before`, and the first part in it.

    Rows that nothing is added to become 0. Parts beyond MERGED_AT_ONCE are added in rounds, as in `merge_parts`.
    """
    into = into[:, window.start : window.stop]
    before = None if before is None else before[:, window.start : window.stop]
    *rounds, last = _rounds(parts)
    between = into
    if rounds:
        between = _unrounded(into) if before is None else before
    for some in rounds:
        _add_round(some, window.start, before, between)
        before = between
    _add_round(last, window.start, before, into, at_home=is_first_at_home and before is None)


def _cut(partial: Partial, window: range) -> Partial:
    return Partial(partial.out[:, window.start : window.stop], partial.lse[..., window.start : window.stop])


def _unrounded(into: Tensor) -> Tensor:
    return _like(into, accumulator_dtype(into.dtype))


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)


def _rounds(parts: Sequence[Part]) -> list[Sequence[Part]]:
    return [parts[i : i + MERGED_AT_ONCE] for i in range(0, len(parts), MERGED_AT_ONCE)] or [()]


# ------------------------------------------------------------------------------------------------------- launches


def _merge_round(
    parts: Sequence[Part], first: int, before: Partial | None, into: Partial, *, at_home: bool = False
) -> None:
    """`first`: the row of the whole tensor that is row 0 of `before` and `into`."""
    if into.out.numel() == 0:
        return
    _check(parts, into.out)
    old = into if before is None else before
    block = _block(into.out, MERGING)
    slots, stride = _slots(parts), _stride(parts, into.out, block.rows)
    known = _known(slots, len(parts), into.out, stride, block.rows)
    looks, seats, asked = known.tables.read()
    with _on_device_of(into.out):
        _merge[_grid(into.out, stride, block.rows)](
            *_filled([part.out for part in slots], old.out),
            *_filled([part.lse for part in slots], old.lse),
            looks,
            seats,
            asked,
            *old,
            *into,
            *old.out.stride()[:3],
            *old.lse.mT.stride(),
            *into.out.stride()[:3],
            *into.lse.mT.stride(),
            first,
            into.out.shape[1],
            *_turns(into.out, stride, first, block.rows),
            COUNT=len(slots),
            HAS_OLD=before is not None,
            AT_HOME=at_home,
            EVEN=known.is_even(first, into.out.shape[1]),
            LOG=_wider(old.lse, into.lse),
            ACC=_wider(old.out, into.out, *(part.out for part in slots)),
            ALIGNED=_is_aligned(old.out, into.out, *(part.out for part in slots)),
            **_sizes(into.out, block),
        )


def _add_round(
    parts: Sequence[Part], first: int, before: Tensor | None, into: Tensor, *, at_home: bool = False
) -> None:
    if into.numel() == 0:
        return
    _check(parts, into)
    old = into if before is None else before
    block = _block(into, BLOCKS)
    slots, stride = _slots(parts), _stride(parts, into, block.rows)
    known = _known(slots, len(parts), into, stride, block.rows)
    looks, seats, asked = known.tables.read()
    with _on_device_of(into):
        _add[_grid(into, stride, block.rows)](
            *_filled([part.out for part in slots], old),
            looks,
            seats,
            asked,
            old,
            into,
            *old.stride()[:3],
            *into.stride()[:3],
            first,
            into.shape[1],
            *_turns(into, stride, first, block.rows),
            COUNT=len(slots),
            HAS_OLD=before is not None,
            AT_HOME=at_home,
            EVEN=known.is_even(first, into.shape[1]),
            ACC=_wider(old, into, *(part.out for part in slots)),
            ALIGNED=_is_aligned(old, into, *(part.out for part in slots)),
            **_sizes(into, block),
        )


def _on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Where Triton launches. To ask is quicker than to change to where one is."""
    is_here = not x.is_cuda or x.device.index == torch.cuda.current_device()
    return nullcontext() if is_here else torch.cuda.device(x.device)


def _check(parts: Sequence[Part], into: Tensor) -> None:
    d = into.shape[3]
    if d > max(BLOCKS):
        raise ValueError(f"rows of up to {max(BLOCKS)} numbers are merged here; got d = {d}")
    for place, out, _ in parts:
        want = place.many, place.heads, len(place.rows), d
        if out.shape != want or out.stride(3) != 1:
            got = f"{tuple(out.shape)}, strides {out.stride()}"
            raise ValueError(f"a part here must be {want}, with stride 1 along d; got {got}")
    assert into.stride(3) == 1
    assert all(part.place.extent.stop <= FAR for part in parts)


def _slots(parts: Sequence[Part]) -> list[Part]:
    """The parts, the last one standing in for some that are missing: a kernel is compiled for 1, 2, 4, 8 and 16."""
    missing = _power_of_two(len(parts)) - len(parts) if parts else 0
    return [*parts, *(parts[-1] for _ in range(missing))]


def _filled(tensors: list[Tensor], other: Tensor) -> list[Tensor]:
    """As many as the kernels have parameters for; they read COUNT of them."""
    return tensors + (tensors[-1:] or [other]) * (len(_OUTS) - len(tensors))


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


class _Block(NamedTuple):
    """What a program does at once."""

    wide: int
    rows: int
    warps: int


def _block(into: Tensor, blocks: Mapping[int, tuple[int, int]]) -> _Block:
    wide = max(16, _power_of_two(into.shape[3]))
    return _Block(wide, *blocks[wide])


def _grid(into: Tensor, stride: int, rows: int) -> tuple[int]:
    return (into.shape[0] * _programs(into, stride, rows),)


def _programs(into: Tensor, stride: int, rows: int) -> int:
    """Of a batch row."""
    _, n, heads, _ = into.shape
    return heads * stride * -(-n // (stride * rows))


def _stride(parts: Sequence[Part], into: Tensor, rows: int) -> int:
    """How far apart the rows of a program lie: so that a part has either all of them or none, wherever steps agree.

    In LongNet half the rows are in one branch only, and asking all branches for them would cost more than the merge.
    """
    steps = {part.place.rows.step for part in parts if len(part.place.rows) > 1}
    widest = max(steps, default=1)
    is_filled = widest * rows <= into.shape[1]  # or most of a program's rows would not exist
    return widest if is_filled and widest <= FARTHEST and all(widest % step == 0 for step in steps) else 1


def _sizes(into: Tensor, block: _Block) -> dict[str, Any]:
    return {"D": into.shape[3], "WIDE": block.wide, "ROWS": block.rows, "num_warps": block.warps}


def _wider(*tensors: Tensor) -> tl.dtype:
    return tl.float64 if any(x.dtype == torch.float64 for x in tensors) else tl.float32


def _is_aligned(*tensors: Tensor) -> bool:
    """Whether all rows begin at multiples of 16 bytes, so that a thread may load that many at once."""
    return all(
        x.data_ptr() % 16 == 0
        and not any(
            stride * x.element_size() % 16 for size, stride in zip(x.shape, x.stride()[:3], strict=False) if size > 1
        )
        for x in tensors
    )


# --------------------------------------------------------------------------------------------------------- tables

LOOK = tl.constexpr(14)  # integers of a part, in the order of `_look`
SEAT = tl.constexpr(4)  # and of a head in it, in the order of `_seat`


class _Look(NamedTuple):
    """All integers that a part consists of."""

    place: Place
    out: tuple[int, ...]  # strides
    lse: tuple[int, ...]


class _Known(NamedTuple):
    """What there is to know of a kind of call."""

    tables: Tables  # [parts, LOOK], [batch * heads, parts, SEAT], [batch * heads, stride]
    span: int  # rows of the tensor that a program's lie in
    beats: int | None  # where spans begin, modulo their length, if every part has all rows of a program or none

    def is_even(self, first: int, n: int) -> bool:
        return self.beats is not None and (first - self.beats) % self.span == 0 and n % self.span == 0


def _known(slots: Sequence[Part], count: int, into: Tensor, stride: int, rows: int) -> _Known:
    looks = tuple(_Look(place, out.stride(), (0,) * 3 if lse is None else lse.stride()) for place, out, lse in slots)
    return _made(into.device, into.shape[0], into.shape[2], looks, count, stride, rows)


@lru_cache(maxsize=256)
def _made(
    device: torch.device, batch: int, heads: int, looks: tuple[_Look, ...], count: int, stride: int, rows: int
) -> _Known:
    everyone = [(b, h) for b in range(batch) for h in range(heads)]
    seats = [[_seat(look, *one) for look in looks] for one in everyone]
    asked = [tuple(_asked(looks[:count], some, row, stride) for row in range(stride)) for some in seats]
    written = [_look(look, stride) for look in looks], [seat for some in seats for seat in some], asked
    tables = Tables([torch.tensor(table, dtype=torch.int64, device="cpu") for table in written], device)
    return _Known(tables, rows * stride, _beats(looks, stride, rows * stride))


def _beats(looks: Sequence[_Look], stride: int, span: int) -> int | None:
    """Where spans must begin, modulo their length, so that a part that is asked has all rows of a program or none."""
    found = set()
    for place, out, lse in looks:
        step, whole = place.rows.step, len(place.rows) * place.rows.step
        has_gaps = place.repeats > 1 and whole != place.spacing
        farthest = max(out[0], lse[0], span * out[2], span * lse[2])
        if has_gaps or stride % step or whole % span or farthest > FAR:
            return None
        starts = (place.rows.start + place.skew * down for down in range(len(place.kv_heads)))
        found |= {start // step * step % span for start in starts}
    return found.pop() if len(found) == 1 else None


def _asked(looks: Sequence[_Look], seats: Sequence[tuple[int, ...]], row: int, stride: int) -> int:
    """Which parts can have rows of a head that lie a stride apart, from this row of the tensor on: a bit for each."""
    bits = 0
    for i, (look, seat) in enumerate(zip(looks, seats, strict=False)):
        step = _step(look.place) if stride > 1 else 1
        bits |= (seat is not _NOWHERE and (row - seat[0]) % step == 0) << i
    return bits


def _step(place: Place) -> int:
    """Of all its rows, from repeat to repeat; 1 where they have none."""
    is_even = place.repeats == 1 or place.spacing % place.rows.step == 0
    return place.rows.step if is_even and len(place.rows) > 1 else 1


_NOWHERE = (FAR, 0, 0, 0)


def _seat(look: _Look, batch: int, head: int) -> tuple[int, int, int, int]:
    """(first row, one past the last, where its numbers begin, where its lse do) of a head of a batch row in a part."""
    place, out, lse = look
    kv_head, of_it = divmod(head, place.share)
    if batch not in place.batch or kv_head not in place.kv_heads:
        return _NOWHERE
    many, down = place.batch.index(batch), place.kv_heads.index(kv_head)
    among = down * place.share + of_it
    start = place.rows.start + place.skew * down
    stop = start + place.spacing * (place.repeats - 1) + place.rows[-1] - place.rows[0] + 1
    return start, stop, many * out[0] + among * out[1], many * lse[0] + among * lse[1]


def _look(look: _Look, stride: int) -> tuple[int, ...]:
    (_, repeats, spacing, _, _, rows, _), out, lse = look
    spacing = spacing if repeats > 1 else FAR
    apart = stride // rows.step  # rows of the part from one of a program's to the next, where it is even
    return (
        *(spacing, *_reciprocal(spacing)),
        *(rows.step, *_reciprocal(rows.step)),
        *(len(rows), repeats),
        *(out[0], out[2]),
        *(lse[0], lse[2]),
        *(apart * out[2], apart * lse[2]),
    )


def _turns(into: Tensor, stride: int, first: int, rows: int) -> tuple[int, ...]:
    """What programs are counted by: heads, stride, programs of a batch row; the phase; reciprocals of the three."""
    counts = into.shape[2], stride, _programs(into, stride, rows)
    return *counts, first % stride, *map(_in_one, counts)


def _in_one(divisor: int) -> int:
    """Its reciprocal as an integer that nobody takes for one of 32 bits, for which a kernel would be compiled anew."""
    factor, shift = _reciprocal(divisor)
    return factor | (32 + shift) << 32


@lru_cache(maxsize=1024)
def _reciprocal(divisor: int) -> tuple[int, int]:
    """(factor, shift): x // divisor == (2 * x * factor >> 32) >> shift for 0 <= x < 2**31; a GPU divides far slower.

    factor is 2**(31 + bits) / divisor, in 32 bits and at most 1 too much: off by x / 2**(31 + bits) < 1 / 2**bits,
    less than what x / divisor lacks to the next integer.
    """
    bits = (divisor - 1).bit_length()
    return -(-(1 << (31 + bits)) // divisor), bits


# -------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _own(asked, heads, stride, each, phase, by_heads, by_stride, by_each, ROWS: tl.constexpr):
    """(batch row, head, first row) of this program, whose rows lie a stride apart, and which parts to ask for them.

    Programs of all heads of a row run together, as its heads lie, and those that share a stretch of rows do.
    """
    batch = _count(tl.program_id(0), by_each)
    me = tl.program_id(0) - batch * each
    row = _count(me, by_heads)
    head = me - row * heads
    block = _count(row, by_stride)
    lead = row - block * stride
    turn = lead + phase
    turn -= tl.where(turn < stride, 0, stride)
    bits = tl.load(asked + (batch * heads + head) * stride + turn)
    return batch.to(tl.int64), head.to(tl.int64), block * (ROWS * stride) + lead, bits


@triton.jit
def _is_near(seat, first, stride, ROWS: tl.constexpr):
    """Whether a part of this head begins at or before the program's last row, and ends after its first.

    Against the row one stride past the last, a part that begins in between would be taken for near: where the first
    row answers for all (EVEN), it would then be looked up before its beginning, at a negative offset.
    """
    return (tl.load(seat) <= first + (ROWS - 1) * stride) & (tl.load(seat + 1) > first)


@triton.jit
def _divided(x, reciprocal):
    """x // divisor, for what `_reciprocal` made of the divisor."""
    return _over(x, tl.load(reciprocal), tl.load(reciprocal + 1))


@triton.jit
def _count(x, reciprocal):
    """The same, for what `_in_one` made of it."""
    return _over(x, reciprocal, reciprocal >> 32 & 31)


@triton.jit
def _over(x, factor, shift):
    return (tl.umulhi(x.to(tl.uint32) << 1, factor.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def _found(lead, stride, seat, look, EVEN: tl.constexpr, ROWS: tl.constexpr):
    """(which rows from `lead` on a head has in a part that is near, where their numbers begin, where their lse are).

    Where all is even, the first row answers for the others.
    """
    i = tl.arange(0, ROWS)
    x = lead - tl.load(seat).to(tl.int32)
    if not EVEN:
        x += stride * i
    repeat = _divided(x, look + 1)
    rest = x - repeat * tl.load(look).to(tl.int32)
    row = _divided(rest, look + 4)
    if EVEN:
        held = tl.full((ROWS,), True, tl.int1)
    else:
        is_row = (row * tl.load(look + 3).to(tl.int32) == rest) & (row < tl.load(look + 6).to(tl.int32))
        held = (x >= 0) & is_row & (repeat < tl.load(look + 7).to(tl.int32))
    out = _begin(seat + 2, repeat, row, look + 8, EVEN)
    lse = _begin(seat + 3, repeat, row, look + 10, EVEN)
    if EVEN:
        out += i * tl.load(look + 12).to(tl.int32)
        lse += i * tl.load(look + 13).to(tl.int32)
    return held, out, lse


@triton.jit
def _begin(seat, repeat, row, strides, EVEN: tl.constexpr):
    of_repeat, of_row = tl.load(strides), tl.load(strides + 1)
    if EVEN:  # then they are short, and their products quicker
        of_repeat, of_row = of_repeat.to(tl.int32).to(tl.int64), of_row.to(tl.int32).to(tl.int64)
    return tl.load(seat) + repeat.to(tl.int64) * of_repeat + row.to(tl.int64) * of_row


@triton.jit
def _spread(x, begin, mask, ALIGNED: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """(pointers to the numbers, which of them exist) of the rows that begin at these offsets."""
    cols = tl.arange(0, WIDE)
    numbers = x + begin[:, None] + cols[None, :]
    if ALIGNED:
        # said of the pointers, and only here: no argument is specialised on its alignment, and what is said of a
        # function's argument or result is forgotten when it is inlined
        numbers = tl.multiple_of(numbers, (1, 16))
    mask = mask[:, None]
    if D != WIDE:
        mask &= (cols < D)[None, :]
    return numbers, mask


@triton.jit
def _offset(batch, row, head, by_batch, by_row, by_head):
    return batch * by_batch + row.to(tl.int64) * by_row + head * by_head


@triton.jit
def _leave(
    new,
    begin,
    held,
    mine,
    ALIGNED: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rows that are held stay as they are, and those that are not become 0."""
    lacking = mine & (held == 0)
    numbers, mask = _spread(new, begin, lacking, ALIGNED, D, WIDE)
    tl.store(numbers, tl.zeros(numbers.shape, new.dtype.element_ty), mask=mask)


@triton.jit
def _taken(
    acc,
    top,
    total,
    outs,
    lses,
    held,
    begin,
    at,
    ACC: tl.constexpr,
    LOG: tl.constexpr,
    ALIGNED: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """What was seen so far, and what a part saw."""
    nothing = float("-inf")
    part, part_mask = _spread(outs, begin, held, ALIGNED, D, WIDE)
    out = tl.load(part, mask=part_mask, other=0.0).to(ACC)
    lse = tl.load(lses + at, mask=held, other=nothing).to(LOG)
    seen = lse != nothing
    larger = lse > top
    less = tl.exp(-tl.abs(tl.where(seen, lse, 0.0) - top))  # (-inf) - (-inf) would be nan
    kept = tl.where(larger, less, 1.0)
    weight = tl.where(seen, tl.where(larger, 1.0, less), 0.0)
    out = tl.where(seen[:, None], out, 0.0)  # what an operation leaves in a row that saw nothing may be nan
    acc = acc * kept.to(ACC)[:, None] + out * weight.to(ACC)[:, None]
    return acc, tl.where(larger, lse, top), total * kept + weight


# A kernel is compiled for nothing that changes from call to call: no length, count or stride (integers are as wide as
# declared, and not specialised), nor where a tensor begins. Tensors are parameters of their own, since Triton
# specialises every element of a tuple: 16 parts at 16 alignments were a compilation of seconds for nearly every launch.
_INTEGERS = ["first", "n", "heads", "stride", "each", "phase", "by_heads", "by_stride", "by_each"]
_STRIDES = [f"{of}_by_{axis}" for of in ("old", "new") for axis in ("batch", "row", "head")]
_STRIDES_OF_LSE = [f"{of}_lse_by_{axis}" for of in ("old", "new") for axis in ("batch", "row", "head")]
_OUTS = [f"out{i}" for i in range(MERGED_AT_ONCE)]
_LSES = [f"lse{i}" for i in range(MERGED_AT_ONCE)]


@triton.jit(
    do_not_specialize=[*_INTEGERS, *_STRIDES, *_STRIDES_OF_LSE],
    do_not_specialize_on_alignment=[*_OUTS, *_LSES, "old_out", "old_lse", "new_out", "new_lse"],
)
def _merge(
    out0,
    out1,
    out2,
    out3,
    out4,
    out5,
    out6,
    out7,
    out8,
    out9,
    out10,
    out11,
    out12,
    out13,
    out14,
    out15,
    lse0,
    lse1,
    lse2,
    lse3,
    lse4,
    lse5,
    lse6,
    lse7,
    lse8,
    lse9,
    lse10,
    lse11,
    lse12,
    lse13,
    lse14,
    lse15,
    looks,
    seats,
    asked,
    old_out,
    old_lse,
    new_out,
    new_lse,
    old_by_batch: tl.int64,
    old_by_row: tl.int64,
    old_by_head: tl.int64,
    old_lse_by_batch: tl.int64,
    old_lse_by_row: tl.int64,
    old_lse_by_head: tl.int64,
    new_by_batch: tl.int64,
    new_by_row: tl.int64,
    new_by_head: tl.int64,
    new_lse_by_batch: tl.int64,
    new_lse_by_row: tl.int64,
    new_lse_by_head: tl.int64,
    first: tl.int32,
    n: tl.int32,
    heads: tl.int32,
    stride: tl.int32,
    each: tl.int32,
    phase: tl.int32,
    by_heads: tl.int64,
    by_stride: tl.int64,
    by_each: tl.int64,
    COUNT: tl.constexpr,
    HAS_OLD: tl.constexpr,
    AT_HOME: tl.constexpr,
    EVEN: tl.constexpr,
    LOG: tl.constexpr,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Seen so far is acc / total, with exp(top) taken out of both: no weight exceeds 1, and none overflows."""
    outs = (out0, out1, out2, out3, out4, out5, out6, out7, out8, out9, out10, out11, out12, out13, out14, out15)
    lses = (lse0, lse1, lse2, lse3, lse4, lse5, lse6, lse7, lse8, lse9, lse10, lse11, lse12, lse13, lse14, lse15)
    batch, head, lead, bits = _own(asked, heads, stride, each, phase, by_heads, by_stride, by_each, ROWS)
    own = lead + stride * tl.arange(0, ROWS)
    mine = tl.full((ROWS,), True, tl.int1) if EVEN else own < n
    seats += (batch * heads + head) * COUNT * SEAT
    new_begin = _offset(batch, own, head, new_by_batch, new_by_row, new_by_head)
    new_at = _offset(batch, own, head, new_lse_by_batch, new_lse_by_row, new_lse_by_head)
    nothing = float("-inf")
    if AT_HOME:  # noqa: SIM102
        if bits == 1:
            held, _, at = _found(first + lead, stride, seats, looks, EVEN, ROWS)
            held &= mine & _is_near(seats, first + lead, stride, ROWS)
            lse = tl.load(lses[0] + at, mask=held, other=nothing)
            tl.store(new_lse + new_at, lse.to(new_lse.dtype.element_ty), mask=mine)
            seen = held & (lse != nothing)  # what an operation leaves in a row that saw nothing may be nan
            _leave(new_out, new_begin, seen, mine, ALIGNED, D, WIDE)
            return
    acc = tl.zeros((ROWS, WIDE), ACC)
    top = tl.full((ROWS,), nothing, LOG)
    total = tl.zeros((ROWS,), LOG)
    if HAS_OLD:
        begin = _offset(batch, own, head, old_by_batch, old_by_row, old_by_head)
        old, old_mask = _spread(old_out, begin, mine, ALIGNED, D, WIDE)
        acc = tl.load(old, mask=old_mask, other=0.0).to(ACC)
        at = _offset(batch, own, head, old_lse_by_batch, old_lse_by_row, old_lse_by_head)
        top = tl.load(old_lse + at, mask=mine, other=nothing).to(LOG)
        total = tl.full((ROWS,), 1.0, LOG)
    for i in tl.static_range(COUNT):
        if (bits >> i & 1) != 0:  # noqa: SIM102 (`and` would ask both)
            if _is_near(seats + i * SEAT, first + lead, stride, ROWS):
                held, begin, at = _found(first + lead, stride, seats + i * SEAT, looks + i * LOOK, EVEN, ROWS)
                acc, top, total = _taken(
                    acc, top, total, outs[i], lses[i], held & mine, begin, at, ACC, LOG, ALIGNED, D, WIDE
                )
    unseen = total == 0.0
    total = tl.where(unseen, 1.0, total)
    new, new_mask = _spread(new_out, new_begin, mine, ALIGNED, D, WIDE)
    tl.store(new, (acc * (1.0 / total).to(ACC)[:, None]).to(new_out.dtype.element_ty), mask=new_mask)
    lse = tl.where(unseen, nothing, top + tl.log(total)).to(new_lse.dtype.element_ty)
    tl.store(new_lse + new_at, lse, mask=mine)


@triton.jit(
    do_not_specialize=[*_INTEGERS, *_STRIDES],
    do_not_specialize_on_alignment=[*_OUTS, "old_sum", "new_sum"],
)
def _add(
    out0,
    out1,
    out2,
    out3,
    out4,
    out5,
    out6,
    out7,
    out8,
    out9,
    out10,
    out11,
    out12,
    out13,
    out14,
    out15,
    looks,
    seats,
    asked,
    old_sum,
    new_sum,
    old_by_batch: tl.int64,
    old_by_row: tl.int64,
    old_by_head: tl.int64,
    new_by_batch: tl.int64,
    new_by_row: tl.int64,
    new_by_head: tl.int64,
    first: tl.int32,
    n: tl.int32,
    heads: tl.int32,
    stride: tl.int32,
    each: tl.int32,
    phase: tl.int32,
    by_heads: tl.int64,
    by_stride: tl.int64,
    by_each: tl.int64,
    COUNT: tl.constexpr,
    HAS_OLD: tl.constexpr,
    AT_HOME: tl.constexpr,
    EVEN: tl.constexpr,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    outs = (out0, out1, out2, out3, out4, out5, out6, out7, out8, out9, out10, out11, out12, out13, out14, out15)
    batch, head, lead, bits = _own(asked, heads, stride, each, phase, by_heads, by_stride, by_each, ROWS)
    own = lead + stride * tl.arange(0, ROWS)
    mine = tl.full((ROWS,), True, tl.int1) if EVEN else own < n
    seats += (batch * heads + head) * COUNT * SEAT
    new_begin = _offset(batch, own, head, new_by_batch, new_by_row, new_by_head)
    if AT_HOME:  # noqa: SIM102
        if bits == 1:
            held, _, _ = _found(first + lead, stride, seats, looks, EVEN, ROWS)
            held &= _is_near(seats, first + lead, stride, ROWS)
            _leave(new_sum, new_begin, held, mine, ALIGNED, D, WIDE)
            return
    acc = tl.zeros((ROWS, WIDE), ACC)
    if HAS_OLD:
        begin = _offset(batch, own, head, old_by_batch, old_by_row, old_by_head)
        old, old_mask = _spread(old_sum, begin, mine, ALIGNED, D, WIDE)
        acc = tl.load(old, mask=old_mask, other=0.0).to(ACC)
    for i in tl.static_range(COUNT):
        if (bits >> i & 1) != 0:  # noqa: SIM102
            if _is_near(seats + i * SEAT, first + lead, stride, ROWS):
                held, begin, _ = _found(first + lead, stride, seats + i * SEAT, looks + i * LOOK, EVEN, ROWS)
                part, part_mask = _spread(outs[i], begin, held & mine, ALIGNED, D, WIDE)
                acc += tl.load(part, mask=part_mask, other=0.0).to(ACC)
    new, new_mask = _spread(new_sum, new_begin, mine, ALIGNED, D, WIDE)
    tl.store(new, acc.to(new_sum.dtype.element_ty), mask=new_mask)
