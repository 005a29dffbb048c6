"""Tiles by fused operations: gathered into stacks, each by the fastest that takes it, or many of them at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..geometry.ranges import moved
from ..geometry.stacks import Place, Stack
from ..geometry.tiles import Repeat, Tile
from .contract import Upstream
from .operations.contract import Homes, Operation, Rows, with_columns_for_dlse
from .rates import Pass
from .recipes import Alone, Asked, Leg, Together, recipe, settled_recipe
from .reference import ReferenceKernel
from .totals import Seen, Sums, is_lazy


class FusedKernel:
    """One operation, or several of which every stack takes the fastest, forward and backward apart."""

    def __init__(self, name: str, operations: Sequence[Operation]) -> None:
        self.name, self._operations = name, tuple(operations)

    def with_the_same_bits(self) -> FusedKernel | None:
        """Of its operations those that give the same bits from run to run."""
        found = [one for operation in self._operations if (one := operation.with_the_same_bits()) is not None]
        return FusedKernel(self.name, found) if found else None

    def refusal(self, q: Tensor, k: Tensor) -> str | None:
        reasons = [operation.refusal(q, q.shape[3]) for operation in self._operations]
        if None in reasons:
            return None
        one = len(self._operations) == 1
        said = (f"{o.name} {why}" for o, why in zip(self._operations, reasons, strict=True))
        return str(reasons[0]) if one else f"has no operation for this: {'; '.join(said)}"

    def recipe(
        self,
        which: Pass,
        tiles: Sequence[Tile],
        q: Tensor,
        k: Tensor,
        *,
        is_first: bool,
        can_be_done: bool,
        has_dlse: bool = False,
        has_sign: bool = False,
        comes_again: bool = False,
    ) -> tuple[Leg, ...]:
        """What computes the tiles. `is_first`: nothing came before; `can_be_done`: nothing will come afterwards.

        `comes_again`: as for a call made many times, whose plans are worth building (cuDNN).
        """
        asked = Asked(
            *(which, q.shape, k.shape, q.dtype, q.device, is_lazy(q.device)), is_first, can_be_done, has_dlse, has_sign
        )
        return (settled_recipe if comes_again else recipe)(self._operations, tuple(tiles), asked)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], *, scale: float, total: Seen | None = None
    ) -> Seen:
        total = Seen(q) if total is None else total
        sign, scale = _positive(scale)
        legs = self.recipe("forward", tiles, q, k, is_first=total.is_empty, can_be_done=total.can_be_done)
        q, k, v = _aligned(q), _aligned(k), _aligned(v)
        signed = q if sign == 1 else sign * q
        for rows, steps in legs:
            for step in steps:
                if isinstance(step, Together):
                    _look_together(step, signed, k, v, scale, total)
                elif step.operation is None:
                    ReferenceKernel().forward(q, k, v, _as_tiles(step.stack), scale=sign * scale, total=total)
                else:
                    _look(step, step.operation, signed, k, v, scale, total)
            if len(legs) > 1:
                total.rows_done(rows)
        return total

    def backward(
        self,
        upstream: Upstream,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Sequence[Tile],
        *,
        scale: float,
        total: Sums | None = None,
    ) -> Sums:
        total = Sums.of(q, k) if total is None else total
        sign, scale = _positive(scale)
        legs = self.recipe(
            *("backward", tiles, q, k),
            is_first=all(one.is_empty for one in total),
            can_be_done=all(one.can_be_done for one in total),
            has_dlse=upstream.dlse is not None,
            has_sign=sign != 1,
        )
        upstream = upstream._replace(dout=_aligned(upstream.dout), out=_aligned(upstream.out))
        q, k, v = _aligned(q), _aligned(k), _aligned(v)
        signed = q if sign == 1 else sign * q
        for rows, steps in legs:
            for step in steps:
                if isinstance(step, Together):
                    _look_back_together(step, upstream, signed, k, v, scale, total, sign)
                elif step.operation is None:
                    some = _as_tiles(step.stack)
                    ReferenceKernel().backward(upstream, q, k, v, some, scale=sign * scale, total=total)
                else:
                    _look_back(step, step.operation, upstream, signed, k, v, scale, total, sign)
            if len(legs) > 1:
                for one in total:
                    one.rows_done(rows)
        return total


# ----------------------------------------------------------------------------------------------- many stacks
# these and those of one stack are functions so that their results are freed before the next make their own


def _look_together(step: Together, q: Tensor, k: Tensor, v: Tensor, scale: float, total: Seen) -> None:
    found = step.operation.forward_many(q, k, v, step.pack, scale)
    for tray, (out, lse) in zip(step.pack.queries.trays, found, strict=True):
        total.add(tray.place, out, lse)


def _look_back_together(
    step: Together, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor, scale: float, total: Sums, sign: float
) -> None:
    rows = Rows(upstream.dout, upstream.out, upstream.lse, upstream.dlse)
    dq, dk, dv = step.operation.backward_many(rows, q, k, v, step.pack, scale)
    for tray, part in zip(step.pack.queries.trays, dq, strict=True):
        total.dq.add(tray.place, part if sign == 1 else sign * part)
    for tray, of_k, of_v in zip(step.pack.keys.trays, dk, dv, strict=True):
        total.dk.add(tray.place, of_k)
        total.dv.add(tray.place, of_v)


# ------------------------------------------------------------------------------------------------- one stack


def _look(step: Alone, operation: Operation, q: Tensor, k: Tensor, v: Tensor, scale: float, total: Seen) -> None:
    stack, place = step.stack, step.stack.queries
    home = total.home(place) if step.is_home else None
    if home is None:
        total.add(place, *_attend(operation, q, k, v, stack, scale))
    else:
        operands = *_operands(q, k, v, stack), stack.shape != "full", scale
        total.add_at_home(place, home, operation.forward_into(home, *operands))  # type: ignore[attr-defined]


def _attend(operation: Operation, q: Tensor, k: Tensor, v: Tensor, stack: Stack, scale: float) -> tuple[Tensor, Tensor]:
    flipped = stack.shape == "flipped"
    out, lse = operation.forward(*_operands(q, k, v, stack), stack.shape != "full", scale)
    return _turned(out, flipped), _turned(lse, flipped)


def _look_back(
    step: Alone,
    operation: Operation,
    upstream: Upstream,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    total: Sums,
    sign: float,
) -> None:
    stack = step.stack
    places = stack.queries, stack.keys, stack.keys
    homes: Homes = None, None, None
    if step.is_home:
        dq, dk, dv = (one.home(place) for one, place in zip(total, places, strict=True))
        homes = dq, dk, dv
    found = _attend_backward(operation, upstream, q, k, v, stack, scale, homes)
    for one, place, home, x in zip(total, places, homes, found, strict=True):
        if home is not None:
            one.add_at_home(place, home)
        else:
            one.add(place, sign * x if sign != 1 and one is total.dq else x)


def _attend_backward(
    operation: Operation, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor, stack: Stack, scale: float, homes: Homes
) -> tuple[Tensor, Tensor, Tensor]:
    flipped, d = stack.shape == "flipped", q.shape[3]
    q_, k_, v_ = _operands(q, k, v, stack)
    rows = _rows(upstream, stack.queries, flipped)
    columns = 0 if rows.dlse is None else operation.columns_for_dlse(d)
    if columns:
        rows, q_, k_, v_ = with_columns_for_dlse(rows, q_, k_, v_, columns)
    operands = rows, q_, k_, v_, stack.shape != "full", scale
    if any(home is not None for home in homes):
        return operation.backward_into(homes, *operands)  # type: ignore[attr-defined]
    found = operation.backward(*operands)
    dq, dk, dv = (_turned(x[..., :d] if columns else x, flipped) for x in found)
    return dq, dk, dv


def _operands(q: Tensor, k: Tensor, v: Tensor, stack: Stack) -> tuple[Tensor, Tensor, Tensor]:
    views = stack.queries.view(q), stack.keys.view(k), stack.keys.view(v)
    q_, k_, v_ = (_turned(x, stack.shape == "flipped") for x in views)
    return q_, k_, v_


def _rows(upstream: Upstream, place: Place, flipped: bool) -> Rows:
    dout, out = (_turned(place.view(x), flipped) for x in (upstream.dout, upstream.out))
    lse = _turned(place.row_view(upstream.lse), flipped)
    dlse = None if upstream.dlse is None else _turned(place.row_view(upstream.dlse), flipped)
    return Rows(dout, out, lse, dlse)


def _turned(x: Tensor, flipped: bool) -> Tensor:
    """Read from the last row and column, b >= a is b <= a."""
    return x.flip(2) if flipped else x


def _positive(scale: float) -> tuple[float, float]:
    """(factor of q, scale above 0): a causal mask of -inf times the scale is nan at 0 and +inf below it."""
    if 1e-30 < abs(scale) < 1e30:  # well inside what float32 can hold
        return (1.0, scale) if scale > 0 else (-1.0, -scale)
    return scale, 1.0


def _aligned(x: Tensor) -> Tensor:
    """As it is, unless a GPU could not load it 16 bytes at a time, or a gradient was expanded from one number."""
    if x.device.type == "cpu" or not x.numel():
        return x
    step = 16 // x.element_size()
    is_dense = x.stride(-1) == 1 or x.shape[-1] == 1
    is_spread = all(
        stride % step == 0 and stride > 0 for stride, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1
    )
    if is_dense and ((is_spread and x.data_ptr() % 16 == 0) or x.shape[-1] % step):
        return x
    return x.contiguous() if not x.is_contiguous() else x.clone()


def _as_tiles(stack: Stack) -> list[Tile]:
    """The stack as tiles again, a head at a time where heads are skewed."""
    queries, keys = stack.queries, stack.keys
    repeat = Repeat(queries.repeats, queries.spacing, keys.spacing)
    heads = queries.kv_heads
    each = [heads] if not (queries.skew or keys.skew) else [heads[i : i + 1] for i in range(len(heads))]
    starts = [(moved(queries.rows, i * queries.skew), moved(keys.rows, i * keys.skew)) for i in range(len(each))]
    return [Tile(queries.batch, some, *start, *stack.limits, repeat) for some, start in zip(each, starts, strict=True)]
