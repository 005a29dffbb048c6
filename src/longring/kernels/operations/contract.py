"""What a fused operation promises.

Shapes: q, dout, out [many, heads, rows, d]; k, v [many, kv_heads, columns, d]; lse, dlse [many, heads, rows]. All may
be strided views, dense in d. Nothing is empty, the scale is above 0, and a causal stack is square.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...geometry.packs import Pack, Whole
from ...geometry.stacks import Stack


class Rows(NamedTuple):
    """What the backward pass knows of the rows of a stack."""

    dout: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None


class Operation(Protocol):
    name: str
    is_deterministic: bool  # the same bits from run to run on one kind of hardware
    builds_plans: bool  # for each size it meets for the first time, which takes far longer than a small call

    def with_the_same_bits(self) -> Operation | None:
        """The same, deterministic, if there is such a thing."""
        ...

    def refusal(self, q: Tensor, head_dim: int) -> str | None:
        """Why it cannot compute on tensors like q with such a head dimension, or None if it can."""
        ...

    def takes(self, rows: int, cols: int) -> bool:
        """Whether it computes a tile of these sides."""
        ...

    def columns_for_dlse(self, head_dim: int) -> int:
        """How many columns a gradient of lse needs: 0 where the operation takes it as it is."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(out, lse in natural logarithms)."""
        ...

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of the stack, given what is known of whole rows."""
        ...


Homes = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Where dq, dk and dv may be written, of those that have a place already."""


@runtime_checkable
class WritesInPlace(Operation, Protocol):
    """An operation that can write its results where they belong, into strided memory in q's dtype."""

    def forward_into(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        """lse."""
        ...

    def backward_into(
        self,
        homes: Homes,
        rows: Rows,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv, at their homes or, where one has none, in memory of its own."""
        ...


@runtime_checkable
class TakesMany(Operation, Protocol):
    """An operation that computes many stacks at once, bands among them: a pack.

    It reads tensors as the caller has them, [batch, n, heads, d] and lse [batch, heads, n], and gives what each tray of
    the pack has on it, [many, heads, rows, d] and [many, heads, rows].
    """

    takes_anything: bool  # stacks of whatever sizes and shapes in one launch, wherever they lie

    def takes_many(self, has_dlse: bool) -> bool:
        """Whether it does so as it is installed, and with a gradient of lse: here that is not told in columns."""
        ...

    def in_packs(self, stacks: Sequence[Stack], queries: Whole, keys: Whole) -> list[Pack]:
        """The stacks in packs such as it takes, in as few as there can be; none where it does not take all of them."""
        ...

    def forward_many(self, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float) -> list[tuple[Tensor, Tensor]]:
        """(out, lse) by tray of the queries."""
        ...

    def backward_many(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """dq by tray of the queries, dk and dv by tray of the keys."""
        ...


def with_columns_for_dlse(
    rows: Rows, q: Tensor, k: Tensor, v: Tensor, columns: int
) -> tuple[Rows, Tensor, Tensor, Tensor]:
    """The gradient of lse told in columns: they make rowsum(dout * out), which is all that is used of out, less by it.

    Where dout has a unit and out has -dlse in such units, in as many terms as its dtype needs for a float32; q, k and v
    have zeros.
    """
    dout, out, lse, dlse = rows
    assert dlse is not None
    unit = _unit(dlse) if out.dtype == torch.float16 else dlse.new_ones(())
    terms = _terms(-dlse / unit, out.dtype)
    units = F.pad(unit.to(dout.dtype).expand(*dout.shape[:-1], len(terms)), (0, columns - len(terms)))
    told = F.pad(torch.stack(terms, dim=-1), (0, columns - len(terms)))
    q, k, v = (F.pad(x, (0, columns)) for x in (q, k, v))
    return Rows(torch.cat([dout, units], dim=-1), torch.cat([out, told], dim=-1), lse, None), q, k, v


def _unit(x: Tensor) -> Tensor:
    """A power of two in which the largest of x is some thousands: float16 knows nothing beyond 65,504, which a scaled
    loss is soon, and little below 1e-4."""
    largest = x.detach().nan_to_num(0.0, 0.0, 0.0).abs().amax().clamp_min(torch.finfo(x.dtype).tiny)
    return torch.exp2((torch.log2(largest) - 12).floor().clamp(-14, 15))


def _terms(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of the dtype that add up to x: three of 16 bits have the 24 bits of a float32."""
    if dtype.itemsize >= x.dtype.itemsize:
        return [x.to(dtype)]
    found = []
    for _ in range(3):
        found.append(x.to(dtype))
        x = x - found[-1].to(x.dtype)
    return found
