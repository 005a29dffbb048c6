"""Random parts of a tensor, what they come to in float64, and how far from it a fused pass may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from longring.kernels.places import Part, Place
from longring.numerics.online_softmax import Partial

FLOATS = [torch.bfloat16, torch.float16, torch.float32]


@dataclass(frozen=True)
class Case:
    """What to merge; the numbers are drawn from the seed."""

    n: int
    batch: int
    heads: int
    d: int
    places: tuple[Place, ...]
    part_dtypes: tuple[torch.dtype, ...]
    window: range
    begins: str  # "nothing", "elsewhere" or "in place"
    into_dtype: torch.dtype
    is_strided: bool  # rows and heads of every tensor the other way round in memory
    seed: int

    def tensors(self, device: torch.device, log_dtype: torch.dtype) -> Made:
        return Made(self, device, log_dtype)


class Made:
    def __init__(self, case: Case, device: torch.device, log_dtype: torch.dtype) -> None:
        self.case, self._device = case, device
        self._draw = torch.Generator().manual_seed(case.seed)
        self.parts: list[Part] = []
        for place, dtype in zip(case.places, case.part_dtypes, strict=True):
            size = place.many, place.heads, len(place.rows)
            self.parts.append(Part(place, self._numbers((*size, case.d), dtype), self._logs(size, torch.float32)))
        whole, logs = (case.batch, case.n, case.heads, case.d), (case.batch, case.heads, case.n)
        in_place = case.begins == "in place"
        into_dtype = torch.float32 if in_place else case.into_dtype
        self.into = Partial(self._numbers(whole, into_dtype), self._logs(logs, log_dtype))
        self.before = self.into if in_place else None
        if case.begins == "elsewhere":
            self.before = Partial(self._numbers(whole, torch.float32), self._logs(logs, log_dtype))
        if self.before is not None:
            self.before.out.masked_fill_((self.before.lse == -torch.inf).mT.unsqueeze(-1), 0)
        self.untouched = Partial(self.into.out.clone(), self.into.lse.clone())

    @property
    def sums(self) -> list[Part]:
        return [part._replace(lse=None) for part in self.parts]

    def _numbers(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = torch.randn(shape, generator=self._draw).to(self._device, dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if self.case.is_strided else x

    def _logs(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Now and then a row that saw nothing, and now and then one that outweighs all others."""
        x = torch.randn(shape, generator=self._draw) + 10
        luck = torch.rand(shape, generator=self._draw)
        x = x.masked_fill(luck < 0.2, -torch.inf).where(luck < 0.8, x * 40).to(self._device, dtype)
        return x.mT.contiguous().mT if self.case.is_strided else x

    def assert_merged(self, want: Partial) -> None:
        self.assert_added(want.out)
        rows = self.case.window
        got = self.into.lse.double()
        tolerance = {torch.float32: 1e-6, torch.float64: 1e-9}[self.into.lse.dtype]
        inside = slice(rows.start, rows.stop)
        torch.testing.assert_close(got[..., inside], want.lse[..., inside], rtol=tolerance, atol=1e-6)
        self.into.lse[..., inside] = self.untouched.lse[..., inside]
        assert self.into.lse.equal(self.untouched.lse), "written outside of the window"

    def assert_added(self, want: Tensor) -> None:
        rows, out = self.case.window, self.into.out
        cuts_off = out.dtype == torch.bfloat16 and not out.is_cuda  # as Triton's interpreter does, where a GPU rounds
        unit = torch.finfo(out.dtype).eps * (1.0 if cuts_off else 0.51)
        inside = slice(rows.start, rows.stop)
        torch.testing.assert_close(out[:, inside].double(), want[:, inside], rtol=unit, atol=1e-5)
        out[:, inside] = self.untouched.out[:, inside]
        assert out.equal(self.untouched.out), "written outside of the window"


def merged(made: Made) -> Partial:
    """One softmax over `before` and every part, in float64."""
    weights, lse = _start(made, -torch.inf)
    outs = [weights]
    logs = [lse]
    for place, out, part_lse in made.parts:
        whole, whole_lse = _blank(made, -torch.inf)
        assert part_lse is not None
        place.view(whole).copy_(out)
        place.row_view(whole_lse).copy_(part_lse)
        outs.append(whole)
        logs.append(whole_lse)
    together = torch.stack(logs).logsumexp(0)
    base = together.masked_fill(together == -torch.inf, 0)
    total = sum((one - base).exp().mT.unsqueeze(-1) * out for one, out in zip(logs, outs, strict=True))
    assert isinstance(total, Tensor)
    return Partial(total, together)


def added(made: Made) -> Tensor:
    total, _ = _start(made, 0)
    for place, out, _ in made.parts:
        place.view(total).add_(out.double())
    return total


def _start(made: Made, lse: float) -> tuple[Tensor, Tensor]:
    if made.before is None:
        return _blank(made, lse)
    return made.before.out.double().contiguous(), made.before.lse.double().contiguous()


def _blank(made: Made, lse: float) -> tuple[Tensor, Tensor]:
    out = torch.zeros(made.into.out.shape, dtype=torch.float64, device=made.into.out.device)
    return out, torch.full(made.into.lse.shape, lse, dtype=torch.float64, device=out.device)


# ------------------------------------------------------------------------------------------------- random places


@st.composite
def within(draw: st.DrawFn, n: int, *, widest_step: int = 5) -> range:
    """A range of at least one of 0 to n - 1."""
    start = draw(st.integers(0, n - 1))
    step = draw(st.integers(1, widest_step))
    return range(start, start + step * (draw(st.integers(1, (n - 1 - start) // step + 1)) - 1) + 1, step)


@st.composite
def places(draw: st.DrawFn, n: int, batch: int, kv_heads: int, share: int) -> Place:
    """One of those that a stack of tiles can have: many batch rows or many repeats, skewed or shared heads."""
    heads = draw(within(kv_heads, widest_step=1 if share > 1 else 5))
    rows = draw(within(n))
    room = n - 1 - rows[-1]
    skew = 0 if share > 1 or len(heads) == 1 else draw(st.integers(0, room // (len(heads) - 1)))
    room -= skew * (len(heads) - 1)
    length = rows[-1] - rows[0] + 1
    if room < length or draw(st.booleans()):
        return Place(draw(within(batch)), 1, 0, heads, skew, rows, share)
    spacing = draw(st.integers(length, room))
    one = draw(st.integers(0, batch - 1))
    return Place(range(one, one + 1), draw(st.integers(2, 1 + room // spacing)), spacing, heads, skew, rows, share)


@st.composite
def cases(draw: st.DrawFn, most: int, *, widths: Sequence[int] = range(1, 25)) -> Case:
    n, batch, kv_heads = draw(st.integers(1, most)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    share = draw(st.integers(1, 3))
    floats = st.sampled_from(draw(st.sampled_from([FLOATS, FLOATS, [torch.float64]])))
    some = draw(st.lists(places(n, batch, kv_heads, share), max_size=5))
    return Case(
        n,
        batch,
        kv_heads * share,
        draw(st.sampled_from(widths)),
        tuple(some),
        tuple(draw(floats) for _ in some),
        draw(within(n, widest_step=1)),
        draw(st.sampled_from(["nothing", "elsewhere", "in place"])),
        draw(floats),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )


@st.composite
def even_cases(draw: st.DrawFn, block: int) -> Case:
    """Rows as LongNet's branches have them over ranks: each part has all rows of a program of `block` rows, or none.

    Such parts are looked up by a program's first row alone. They begin at any of several spans, so that some begin
    between two rows of the programs before them.
    """
    stride, batch, kv_heads = draw(st.sampled_from([2, 4])), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    share, span, spans = draw(st.integers(1, 2)), stride * block, 2
    steps = [stride, *draw(st.lists(st.sampled_from([1, 2, stride]), max_size=4))]
    some = tuple(draw(_even_place(step, span, spans, batch, kv_heads, share)) for step in steps)
    floats = st.sampled_from(FLOATS)
    return Case(
        spans * span,
        batch,
        kv_heads * share,
        draw(st.sampled_from([8, 16, 24])),
        some,
        tuple(draw(floats) for _ in some),
        range(draw(st.sampled_from([0, 0, span])), spans * span),
        draw(st.sampled_from(["nothing", "elsewhere", "in place"])),
        draw(floats),
        False,
        draw(st.integers(0, 1000)),
    )


@st.composite
def _even_place(draw: st.DrawFn, step: int, span: int, spans: int, batch: int, kv_heads: int, share: int) -> Place:
    first = draw(st.integers(0, spans - 1))
    stop = draw(st.integers(first + 1, spans))
    heads = draw(within(kv_heads, widest_step=1))
    skew = 1 if share == 1 and 1 < len(heads) <= step and draw(st.booleans()) else 0
    phase = draw(st.integers(0, step - 1 - skew * (len(heads) - 1)))
    rows = range(first * span + phase, stop * span, step)
    return Place(draw(within(batch, widest_step=1)), 1, 0, heads, skew, rows, share)
