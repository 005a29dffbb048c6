"""Sharding: the one place where a user's data is dealt to ranks, and collected again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .autograd import GatherShards, Others, TakeShard, not_compiled
from .errors import ArgumentError, LayoutError, PatternError, naming_rank
from .geometry.layouts import LAYOUTS, Layout, Shard, deal, extended, from_ranges
from .geometry.patterns import Pattern, clean_documents
from .plan.choose import choose_layout
from .tensors import check_kind, spoken
from .transport.contract import Transport, check_timeout
from .transport.select import transport_for


@dataclass(frozen=True)
class Sharding:
    """Which rank of `group` holds which of `length` tokens. A frozen value, the same on every rank.

    group:      a torch ProcessGroup or DeviceMesh, or a transport. None is this process alone, which a ring that is
                asked for by name refuses where torch.distributed knows of several ranks.
    layout:     "contiguous", "zigzag" (one early and one late chunk each, for causal attention), "striped"
                (dealt like cards), "dealt" (chunks dealt by work, for documents), or "auto" with `pattern`.
    documents:  for "dealt": boundaries [0, b1, ..., length], or one such list per batch row.
    align:      cut only at multiples of this, such as a segment length.
    pattern:    what "auto" (and "dealt", for its documents) looks at.

    Any length and any number of ranks work, without padding; a rank may hold nothing.

    >>> from longring.testing import run_ranks
    >>> run_ranks(2, lambda group: Sharding(length=9, group=group).positions.tolist())
    [[0, 1, 2, 7, 8], [3, 4, 5, 6]]
    """

    length: int
    group: Any = None
    layout: str = "zigzag"
    documents: Any = None
    align: int | None = None
    pattern: Pattern | None = None
    shards: tuple[Shard, ...] = ()  # who holds what, by rank; computed, or stated with `from_ranges`

    def __post_init__(self) -> None:
        with naming_rank(self.rank, self.ranks):
            self._settle()

    def _settle(self) -> None:
        if isinstance(self.length, Integral) and not isinstance(self.length, bool):
            object.__setattr__(self, "length", int(self.length))
        object.__setattr__(self, "documents", clean_documents(self.documents))
        if self.pattern is not None and not isinstance(self.pattern, Pattern):
            got = spoken(self.pattern)
            raise PatternError(f"pattern must be longring.Dense(...) or longring.Dilated(...), got {got}")
        if self.shards and self.layout == "ranges":
            self._check_ranges()
        else:
            object.__setattr__(self, "layout", self._named_layout())
            object.__setattr__(self, "shards", self._dealt_as_stated())

    def _dealt_as_stated(self) -> tuple[Shard, ...]:
        """Frameworks that look for tensors in what a module is given copy dataclasses field by field, this one too."""
        shards = self._deal().shards
        if self.shards not in ((), shards):
            raise LayoutError(
                f"shards state a layout of their own, got layout {self.layout!r}; use Sharding.from_ranges"
            )
        return shards

    def _check_ranges(self) -> None:
        if from_ranges(self.shards).length != self.length:
            raise LayoutError(f"shards hold {from_ranges(self.shards).length} tokens, but length is {self.length}")
        if len(self.shards) != self.ranks:
            raise LayoutError(f"shards name {len(self.shards)} ranks, but the group has {self.ranks}")

    @classmethod
    def from_ranges(cls, shards: Iterable[Iterable[range]], *, group: Any = None) -> Sharding:
        """Any assignment: for each rank the ranges of positions it holds, rising; together 0..n-1, each once."""
        transport = transport_for(group)
        with naming_rank(transport.rank, transport.size):
            dealt = from_ranges(shards)
        return cls(length=dealt.length, group=group, layout="ranges", shards=dealt.shards)

    def extend(self, rank: int, tokens: int) -> Sharding:
        """The same assignment with so many more tokens at its end, held by `rank`; nothing is dealt anew.

        Decoding asks for it with every token, so it takes microseconds, however long the sequence is: what this
        sharding holds was checked when it was made.
        """
        with naming_rank(self.rank, self.ranks):
            self._check_extension(rank, tokens)
        longer = self.length + int(tokens)
        held = extended(self.shards[rank], range(self.length, longer))
        made = object.__new__(Sharding)
        made.__dict__.update(
            length=longer,
            group=self.group,
            layout="ranges",
            documents=None,
            align=None,
            pattern=None,
            shards=(*self.shards[:rank], held, *self.shards[rank + 1 :]),
            transport=self.transport,
        )
        return made

    def _check_extension(self, rank: int, tokens: int) -> None:
        for name, number in (("rank", rank), ("tokens", tokens)):
            if not isinstance(number, Integral) or isinstance(number, bool) or number < 0:
                raise ArgumentError(f"{name} must be a whole number of at least 0, got {number!r}")
        if rank >= self.ranks:
            raise ArgumentError(f"rank must be one of the {self.ranks} of the group, 0 to {self.ranks - 1}; got {rank}")

    @cached_property
    def transport(self) -> Transport:
        return transport_for(self.group)

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def ranks(self) -> int:
        return self.transport.size

    @cached_property
    def dealt(self) -> Layout:
        return Layout(self.length, self.shards)

    @property
    def local_length(self) -> int:
        """How many tokens this rank holds."""
        return sum(map(len, self.shards[self.rank]))  # not of `dealt`: a cached property breaks compiled graphs

    @property
    def positions(self) -> Tensor:
        """The global positions of this rank's tokens, rising: for rotary embeddings and losses."""
        held = [torch.arange(r.start, r.stop, r.step) for r in self.shards[self.rank]]
        return torch.cat(held) if held else torch.empty(0, dtype=torch.int64)

    def shard(self, x: Tensor, dim: int = 1, *, timeout: float | None = None) -> Tensor:
        """This rank's part of a tensor that every rank has whole. Backward: every rank has the whole gradient.

        That backward waits for the other ranks; `timeout` bounds it, in seconds.
        """
        self._check(x, dim, self.length, "whole")
        return self._along(dim, TakeShard, x, timeout)

    def unshard(self, x: Tensor, dim: int = 1, *, timeout: float | None = None) -> Tensor:
        """The whole tensor, on every rank, from every rank's part. Backward: this rank's part of the gradient.

        `timeout` bounds the wait for the other ranks, in seconds.
        """
        self._check(x, dim, self.local_length, "this rank's part")
        return self._along(dim, GatherShards, x, timeout)

    def _along(self, dim: int, function: Any, x: Tensor, timeout: float | None) -> Tensor:
        timeout = check_timeout(timeout)  # with one rank too, which tomorrow may be several
        others = None if self.ranks == 1 else Others(self.transport, self.shards, dim % x.ndim, timeout)
        rows = x.movedim(dim, 0).unsqueeze(0)
        found = not_compiled(_applied)(function, rows, others, self.shards[self.rank])
        return found.squeeze(0).movedim(0, dim).contiguous()

    def _check(self, x: Tensor, dim: int, want: int, what: str) -> None:
        check_kind("x", x, fake=True)
        if not isinstance(x, Tensor) or type(dim) is not int or not -x.ndim <= dim < x.ndim:
            got = f"one of shape {list(x.shape)}" if isinstance(x, Tensor) else repr(x)
            raise ArgumentError(f"rank {self.rank}: x must be a tensor with a dimension {dim}, got {got}")
        if x.shape[dim] != want:
            raise LayoutError(
                f"rank {self.rank}: x has {x.shape[dim]} tokens along dim {dim}, but {what} holds {want} "
                f"of {self.length} over {self.ranks} ranks ({self.layout})"
            )

    def _named_layout(self) -> str:
        if not isinstance(self.layout, str) or self.layout not in ("auto", *LAYOUTS):
            raise LayoutError(f"layout must be one of auto, {', '.join(LAYOUTS)}; got {spoken(self.layout)}")
        if self.layout == "auto":
            if self.pattern is None:
                raise LayoutError("layout='auto' needs pattern=..., to see what the tokens will be used for")
            return choose_layout(self.pattern, self.length)[0]
        return self.layout

    def _deal(self) -> Layout:
        documents = self.documents
        if self.pattern is not None:
            if documents not in (None, self.pattern.documents):
                raise LayoutError(f"documents are {documents}, but those of the pattern {self.pattern.documents}")
            documents = self.pattern.documents
        elif documents is not None and self.layout != "dealt":
            raise LayoutError(f"layout {self.layout!r} does not look at documents; give them to the pattern alone")
        if documents is not None and any(row[-1] != self.length for row in documents):
            raise LayoutError(f"documents must end at length {self.length}, got {documents}")
        return deal(self.layout, self.length, self.ranks, documents=documents, align=self.align)


def _applied(function: Any, *args: Any) -> Tensor:
    return function.apply(*args)
