"""Dilated attention branch by branch: each on its own, then mixed by weights through which no gradient flows.

Over one softmax the branches need no mixing: they are tiles like any others. This is for models that were
trained otherwise, as LongNet's released code trains them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import ArgumentError, PatternError
from .geometry.patterns import Dilated, Problem, phases
from .sharding import Sharding
from .transport.select import transport_for


@dataclass(frozen=True)
class Branch(Dilated):
    """One branch of several. It knows the others, so that ranks which differ in any of them learn it at the first."""

    among: tuple[tuple[int, int], ...] = ()

    @property
    def mixed_rates(self) -> tuple[int, ...]:
        """Rows that this branch leaves out are for the others to keep."""
        return tuple(r for _, r in self.among)


class Part(NamedTuple):
    """What a branch gives: as from attention, -inf and 0 where it keeps no row."""

    out: Tensor
    lse: Tensor


def branches_of(pattern: Dilated) -> list[Branch]:
    return [Branch(**_words(pattern, w, r)) for w, r in pattern.branches]


def mixed(parts: Sequence[Part]) -> Part:
    """The branches by their shares of all denominators, taken as constants. lse keeps its true derivative."""
    lses = torch.stack([part.lse for part in parts])
    seen = lses != -torch.inf
    total = torch.where(seen, lses, torch.finfo(lses.dtype).min).logsumexp(0)  # (-inf) - (-inf) would be nan
    shares = torch.where(seen, (lses - total).detach().exp(), 0.0)
    out = _weighed(parts, shares).to(parts[0].out.dtype)  # rounded once
    return Part(out, torch.where(seen.any(0), total, -torch.inf))


def _weighed(parts: Sequence[Part], shares: Tensor) -> Tensor:
    """The sum of out times share, in the dtype of the shares."""
    return reduce(torch.add, (share.mT.unsqueeze(-1) * part.out for part, share in zip(parts, shares, strict=True)))


def _words(pattern: Dilated, w: int, r: int) -> dict[str, Any]:
    same = {"causal": pattern.causal, "phase": pattern.phase, "documents": pattern.documents}
    return {"segment_lengths": [w], "dilation_rates": [r], **same, "among": pattern.branches}


# --------------------------------------------------------------------------- as LongNet's released code does it

NO_KEY = -1e8  # what that code writes where a branch keeps no row, and wherever it finds an lse of 0


def refuse_contradictions(
    compat: Any, phase: Any, documents: Any, mixing_gradient: bool | None, return_lse: bool
) -> None:
    """What compat settles may be named beside it only as it is settled."""
    if compat is None:
        return
    if not isinstance(compat, str) or compat != "torchscale":
        raise ArgumentError(f"compat must be 'torchscale' or None, got {compat!r}")
    if phase not in (None, "block"):
        raise ArgumentError(f"phase={phase!r} contradicts compat='torchscale', whose heads have their phases in blocks")
    if mixing_gradient:
        raise ArgumentError("mixing_gradient=True contradicts compat='torchscale', whose mixing weights are constants")
    if documents is not None:
        raise ArgumentError(
            "documents contradict compat='torchscale', and so do lengths: it knows one sequence in each row"
        )
    if return_lse:
        raise ArgumentError("return_lse=True: compat='torchscale' mixes by weights that no one log-sum-exp stands for")


@dataclass(frozen=True)
class ReleasedBranch(Branch):
    """A branch of torchscale's DilatedAttention on one device; heads are those of the queries."""

    heads: int = 0

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.n_q != problem.n_k or problem.offset:
            raise PatternError(
                "compat='torchscale' is attention of a sequence to itself, got "
                f"{problem.n_q} queries from position {problem.offset} on over {problem.n_k} keys"
            )
        if self.heads != problem.kv_heads:
            raise PatternError(
                f"compat='torchscale' has a kv head for every head, got {self.heads} heads and {problem.kv_heads} "
                "kv heads"
            )
        for w, r in self.among:
            _refuse_late_outputs(w, r, problem.n_k)

    def zero_keys(self, n: int, positions: Tensor) -> Tensor | None:
        """How many keys of the padding rows meet, [heads, positions]; None where it is plain that none does.

        That code cuts a segment longer than the sequence to it, and pads with zeros: the sequence to whole segments,
        then each segment to a multiple of the rate. The zeros are behind the last key, where causal rows do not look.
        """
        (w, r) = self.branches[0]
        if self.causal:
            return None
        w: int = torch.sym_min(w, n)  # type: ignore[assignment]
        if _is_multiple(n, w) and _is_multiple(w, r):
            return None
        blocks = phases(self.heads, r, self.phase)
        phase = torch.tensor([[f] for f, heads in blocks.items() for _ in heads], device=positions.device)
        start = positions // w * w
        real = ((n - start).clamp(max=w) - phase + r - 1) // r
        return -(-w // r) - real


def _is_multiple(n: int, of: int) -> bool:
    """Whether that is plain: to ask it of a compiler's symbol would make a graph for each answer."""
    if not torch.compiler.is_compiling():
        return n % of == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # which loads the compiler

    return statically_known_true(n % of == 0)


def released_branches(pattern: Dilated, q: Tensor) -> list[ReleasedBranch]:
    heads = q.shape[2] if isinstance(q, Tensor) and q.ndim == 4 else 0  # attention refuses other tensors
    return [ReleasedBranch(**_words(pattern, w, r), heads=heads) for w, r in pattern.branches]


def mixed_as_released(branches: Sequence[ReleasedBranch], parts: Sequence[Part], n: int, positions: Tensor) -> Tensor:
    """Mixed for the rows at these positions of n."""
    pairs = zip(branches, parts, strict=True)
    padded = [_among_zero_keys(part, branch.zero_keys(n, positions)) for branch, part in pairs]
    lses = torch.stack([part.lse for part in padded]).detach()
    shares = lses.masked_fill((lses == 0) | (lses == -torch.inf), NO_KEY).softmax(0)
    return _weighed(padded, shares).to(parts[0].out.dtype)


def rows_here(q: Tensor, sharding: Sharding | None, group: Any, layout: str | None) -> tuple[int, Tensor]:
    """(how many queries there are on all ranks, where those here stand), of a call that attention took."""
    if sharding is None and group is None:
        return q.shape[1], torch.arange(q.shape[1], device=q.device)
    dealt = sharding or Sharding(q.shape[1] * transport_for(group).size, group, layout or "")
    return dealt.length, dealt.positions.to(q.device)


def _among_zero_keys(part: Part, zeros: Tensor | None) -> Part:
    """As if each row had met that many keys more, of score 0 and value 0."""
    if zeros is None:
        return part
    out, lse = part
    zeros = zeros.to(lse)
    seen = lse != -torch.inf
    share = torch.sigmoid(torch.where(seen, lse, 0.0) - zeros.log())  # of the keys that are there
    with torch.no_grad():
        top = lse.clamp(min=0)
        # not by log1p: a sum that rounds to 1 has an lse of 0, as in flash attention, and is taken for "no key"
        wider = top + ((lse - top).exp() + zeros * (-top).exp()).log()
    lse = torch.where(seen & (zeros > 0), wider, lse)
    return Part(share.mT.unsqueeze(-1) * out, lse)  # not rounded yet


def _refuse_late_outputs(w: int, r: int, n: int) -> None:
    if w >= n or w % r == 0:
        return
    padded = -(-w // r) * r
    raise PatternError(
        f"segments of {w} at rate {r} over {n} tokens: the released code pads each of the {-(-n // w)} segments to "
        f"{padded} and lays the outputs down with the padding in between, so that those of segment i come i * "
        f"{padded - w} positions late; take segments that are multiples of their rate, or leave compat out"
    )
