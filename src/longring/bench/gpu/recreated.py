"""Other rings, re-created from what their authors published, in our own words, over kernels that are at hand.

Their packages need flash-attn, TransformerEngine or DeepSpeed and a process for each rank; here the ranks are virtual
and take turns on one device, and what travels is in place already, as for our own ring beside them. What is theirs is
the order of the tiles, what is merged when, and in which precision sums are kept. Causal, zigzag where not said
otherwise, and a length that 2 x ranks divides, as they ask for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import LayoutError
from ...geometry.layouts import deal
from ...geometry.patterns import Dense
from .check import Result
from .contest import Entry
from .direct import Direct, Found
from .given import Given

CAUSAL = Dense(causal=True)


class Visit(NamedTuple):
    """A tile of a zigzag ring: at its step a rank has the keys of `owner`."""

    rank: int
    owner: int
    rows: slice
    cols: slice
    causal: bool


class Zigzag(Entry):
    """Tensors dealt to ranks, an early and a late chunk each, and the tiles that all of these rings compute."""

    kind, instead = "re-created", CAUSAL  # their errors are told, not judged
    sums = torch.float32  # in which gradients are summed

    def __init__(self, x: Given, ranks: int, kernel: Direct) -> None:
        n = x.q.shape[1]
        if n % (2 * ranks):
            raise LayoutError(f"a zigzag ring of this kind needs a multiple of {2 * ranks} tokens, got {n}")
        self.ranks, self.kernel, self.dtype = ranks, kernel, x.q.dtype
        shards = deal("zigzag", n, ranks).shards
        positions = [torch.cat([torch.arange(r.start, r.stop) for r in shard]) for shard in shards]
        self._order = torch.cat(positions).argsort().to(x.q.device)
        places = [place.to(x.q.device) for place in positions]
        self.q, self.k, self.v, self.dout = ([y[:, place] for place in places] for y in (x.q, x.k, x.v, x.upstream))
        self.half = n // (2 * ranks)
        self.found: list[Found] = []

    def visits(self, rank: int) -> Iterator[Visit]:
        """Its own keys; then of earlier ranks the early half; then of later ones, for its late queries, everything."""
        everything, early, late = slice(None), slice(0, self.half), slice(self.half, None)
        yield Visit(rank, rank, everything, everything, True)
        for step in range(1, self.ranks):
            owner = (rank - step) % self.ranks
            if step <= rank:
                yield Visit(rank, owner, everything, early, False)
            else:
                yield Visit(rank, owner, late, everything, False)

    def attend(self, visit: Visit) -> Found:
        q, k, v = self.q[visit.rank], self.k[visit.owner], self.v[visit.owner]
        return self.kernel.forward(q[:, visit.rows], k[:, visit.cols], v[:, visit.cols], visit.causal)

    def attend_backward(self, visit: Visit) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = self.found[visit.rank]
        part = Found(out[:, visit.rows], lse[:, :, visit.rows].contiguous())
        q, dout = self.q[visit.rank][:, visit.rows], self.dout[visit.rank][:, visit.rows]
        k, v = self.k[visit.owner][:, visit.cols], self.v[visit.owner][:, visit.cols]
        return self.kernel.backward(dout, q, k, v, part, visit.causal)

    def result(self) -> Result:
        self.found = self.forward()
        out, lse = self.together([found.out for found in self.found]), [found.lse for found in self.found]
        whole = Result(out, torch.cat(lse, 2)[:, :, self._order])
        gradients = self.gradients() if self.has_backward else ()
        return Result(*whole[:2], *map(self.together, gradients))

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), 1)[:, self._order]

    def forward(self) -> list[Found]:
        return [self.rank_forward(rank) for rank in range(self.ranks)]

    def backward(self) -> tuple[list[Tensor], ...]:
        return self.gradients()

    def rank_forward(self, rank: int) -> Found:
        raise NotImplementedError

    def gradients(self) -> tuple[list[Tensor], ...]:
        """dq, dk and dv, rounded at the end."""
        dq, dk, dv = ([torch.zeros_like(x, dtype=self.sums) for x in whole] for whole in (self.q, self.k, self.v))
        for rank in range(self.ranks):
            for visit in self.visits(rank):
                some_dq, some_dk, some_dv = self.attend_backward(visit)
                dq[rank][:, visit.rows] += some_dq
                dk[visit.owner][:, visit.cols] += some_dk
                dv[visit.owner][:, visit.cols] += some_dv
        return tuple([x.to(self.dtype) for x in parts] for parts in (dq, dk, dv))


class RingFlashAttention(Zigzag):
    """ring-flash-attn's zigzag ring: every tile is merged at once, in float32, by a sigmoid of the two lse."""

    def __init__(self, x: Given, ranks: int, kernel: Direct) -> None:
        super().__init__(x, ranks, kernel)
        self.name = f"ring-flash-attn over {kernel.name}"

    def rank_forward(self, rank: int) -> Found:
        visits = self.visits(rank)
        first = self.told(self.attend(next(visits)))
        out, lse = first.out.float(), _as_column(first.lse)
        for visit in visits:
            part = self.told(self.attend(visit))
            so_far, lse_so_far, lse_here = out[:, visit.rows], lse[:, visit.rows], _as_column(part.lse)
            merged = so_far - torch.sigmoid(lse_here - lse_so_far) * (so_far - part.out.float())
            merged_lse = lse_so_far - F.logsigmoid(lse_so_far - lse_here)
            out[:, visit.rows], lse[:, visit.rows] = merged, merged_lse
        return Found(out.to(self.dtype), lse.squeeze(-1).transpose(1, 2).contiguous())

    def told(self, found: Found) -> Found:
        return found


class Yunchang(RingFlashAttention):
    """yunchang's zigzag ring on its path over torch's kernels: the same, lse rounded to 16 bits; it has no backward."""

    has_backward = False

    def __init__(self, x: Given, ranks: int, kernel: Direct) -> None:
        super().__init__(x, ranks, kernel)
        self.name = f"yunchang over {kernel.name}"

    def told(self, found: Found) -> Found:
        return Found(found.out, found.lse.to(self.dtype))


class TransformerEngine(Zigzag):
    """TransformerEngine's point-to-point ring: all partial outputs are kept, and summed at the end in 16 bits."""

    def __init__(self, x: Given, ranks: int, kernel: Direct) -> None:
        super().__init__(x, ranks, kernel)
        self.name = f"TransformerEngine's schedule over {kernel.name}"
        self.sums = x.q.dtype

    def rank_forward(self, rank: int) -> Found:
        visits = list(self.visits(rank))
        kept = [self.attend(visit) for visit in visits]
        lse = kept[0].lse.clone()
        for visit, part in zip(visits[1:], kept[1:], strict=True):
            lse[:, :, visit.rows] = torch.logaddexp(lse[:, :, visit.rows], part.lse)
        out = torch.zeros_like(self.q[rank])
        for visit, part in zip(visits, kept, strict=True):
            out[:, visit.rows] += part.out * _as_column((part.lse - lse[:, :, visit.rows]).exp()).to(self.dtype)
        return Found(out, lse)


class Ulysses(Entry):
    """DeepSpeed's Ulysses: contiguous shards; every rank has all tokens of some heads while it computes."""

    kind, instead = "re-created", CAUSAL  # their errors are told, not judged

    def __init__(self, x: Given, ranks: int, kernel: Direct) -> None:
        if x.q.shape[1] % ranks or x.k.shape[2] % ranks:
            raise LayoutError(f"Ulysses deals tokens and kv heads to {ranks} ranks evenly, got {list(x.k.shape)}")
        self.name = f"Ulysses over {kernel.name}"
        self.ranks, self.kernel = ranks, kernel
        self.q, self.k, self.v, self.dout = (y.chunk(ranks, 1) for y in (x.q, x.k, x.v, x.upstream))
        self._dealt: list[tuple[Tensor, Tensor, Tensor, Found]] = []

    def forward(self) -> list[Tensor]:
        q, k, v = (self._to_heads(x) for x in (self.q, self.k, self.v))
        found = [self.kernel.forward(*three, True) for three in zip(q, k, v, strict=True)]
        self._dealt = list(zip(q, k, v, found, strict=True))
        return self._to_tokens([part.out for part in found])

    def backward(self) -> tuple[list[Tensor], ...]:
        dout = self._to_heads(self.dout)
        parts = [
            self.kernel.backward(d, q, k, v, found, True) for d, (q, k, v, found) in zip(dout, self._dealt, strict=True)
        ]
        return tuple(self._to_tokens(gradients) for gradients in zip(*parts, strict=True))

    def result(self) -> Result:
        out = torch.cat(self.forward(), 1)
        lse = torch.cat([found.lse for *_, found in self._dealt], 1)
        return Result(out, lse, *(torch.cat(parts, 1) for parts in self.backward()))

    def _to_heads(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """What all-to-all does for its ranks: a copy to send from, and the pieces received lie in order."""
        packed = [shard.unflatten(2, (self.ranks, -1)).movedim(2, 0).contiguous() for shard in shards]
        return [torch.cat([pieces[rank] for pieces in packed], 1) for rank in range(self.ranks)]

    def _to_tokens(self, heads: Sequence[Tensor]) -> list[Tensor]:
        pieces = [part.chunk(self.ranks, 1) for part in heads]
        return [torch.cat([part[rank] for part in pieces], 2) for rank in range(self.ranks)]


def _as_column(lse: Tensor) -> Tensor:
    """[batch, heads, n] as [batch, n, heads, 1]."""
    return lse.transpose(1, 2).unsqueeze(-1)
