"""The fused merge and the fused sum against float64, over random places: interpreted, or on a GPU if there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longring.kernels.places import Part, Place
from longring.numerics.online_softmax import Partial, merge_, nothing_seen
from random_parts import Case, added, cases, even_cases, merged
from watched_memory import watched_memory

pytest.importorskip("triton", reason="needs the triton package")
module = pytest.importorskip("longring.kernels.triton.parts")
merge_parts, add_parts = module.merge_parts, module.add_parts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
N = 40
ROWS = 8  # of a program here


@pytest.fixture(autouse=True, scope="module")
def several_programs_a_head():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BLOCKS", "MERGING"):
            patch.setattr(module, name, dict.fromkeys(module.BLOCKS, (ROWS, 4)))
        yield


@pytest.fixture(autouse=True, scope="module")
def _within_tensors():
    with watched_memory():
        yield


@given(cases(N), st.sampled_from([torch.float64, torch.float32]))
def test_a_merge_is_what_all_saw_together(case: Case, log_dtype):
    made = case.tensors(DEVICE, log_dtype)
    want = merged(made)
    merge_parts(made.parts, case.window, made.before, made.into)
    made.assert_merged(want)


@given(cases(N))
def test_a_sum_is_what_all_add_up_to(case: Case):
    made = case.tensors(DEVICE, torch.float64)
    want = added(made)
    add_parts(made.sums, case.window, made.before and made.before.out, made.into.out)
    made.assert_added(want)


@settings(max_examples=25)
@given(even_cases(ROWS), st.sampled_from([torch.float64, torch.float32]))
def test_parts_that_are_looked_up_by_a_programs_first_row(case: Case, log_dtype):
    made = case.tensors(DEVICE, log_dtype)
    want = merged(made), added(made)
    merge_parts(made.parts, case.window, made.before, made.into)
    made.assert_merged(want[0])
    made = case.tensors(DEVICE, log_dtype)
    add_parts(made.sums, case.window, made.before and made.before.out, made.into.out)
    made.assert_added(want[1])


@given(cases(N), st.sampled_from([torch.float64, torch.float32]), st.integers(1, 3))
def test_a_part_may_lie_where_its_rows_belong(case: Case, log_dtype, count):
    """Its memory is that of the result, and rows that no other part has are not moved; the others are as ever."""
    if not case.places:
        return
    some = {"places": case.places[:count], "part_dtypes": case.part_dtypes[:count]}
    made = replace(case, begins="nothing", **some).tensors(DEVICE, log_dtype)
    first = made.parts[0]
    home = first.place.view(made.into.out)
    home.copy_(first.out)
    made.parts[0] = first._replace(out=home)
    made.untouched.out.copy_(made.into.out)
    want, begun = (merged(made), added(made)), made.into.out.clone()
    merge_parts(made.parts, case.window, None, made.into, is_first_at_home=True)
    made.assert_merged(want[0])
    made.into.out.copy_(begun)
    add_parts(made.sums, case.window, None, made.into.out, is_first_at_home=True)
    made.assert_added(want[1])


@pytest.mark.parametrize("d", [260, 512, 520, 1000, 1024])
def test_wide_rows(d):
    place = Place(range(1), 2, 9, range(2), 1, range(1, 8, 2), 1)
    case = Case(20, 1, 2, d, (place,) * 3, (torch.bfloat16,) * 3, range(1, 19), "in place", torch.float32, False, 7)
    made = case.tensors(DEVICE, torch.float64)
    want = merged(made), added(made)
    merge_parts(made.parts, case.window, made.before, made.into)
    made.assert_merged(want[0])
    made = case.tensors(DEVICE, torch.float64)
    add_parts(made.sums, case.window, made.before and made.before.out, made.into.out)
    made.assert_added(want[1])


def test_rows_that_nobody_has_and_rows_that_saw_nothing_are_0_beside_a_part_at_home():
    place = Place(range(1), 1, 0, range(1), 0, range(3, 12), 1)
    into = nothing(20)
    home, lse = place.view(into.out), torch.randn(1, 1, 9, device=DEVICE)
    home.normal_()
    home[0, 0, 2] = torch.nan
    lse[0, 0, 2] = -torch.inf
    want = home.clone()
    merge_parts([Part(place, home, lse)], range(20), None, into, is_first_at_home=True)
    assert into.out[:, [0, 1, 2, 5, *range(12, 20)]].eq(0).all()
    assert into.lse[0, 0, [0, 1, 2, 5, *range(12, 20)]].isneginf().all()
    assert home[0, 0, [0, 1, *range(3, 9)]].equal(want[0, 0, [0, 1, *range(3, 9)]])
    into.out[:, :3] = torch.nan
    add_parts([Part(place, home, None)], range(20), None, into.out, is_first_at_home=True)
    assert into.out[:, [0, 1, 2, *range(12, 20)]].eq(0).all()


def whole(n: int, heads: int = 1) -> Place:
    return Place(range(1), 1, 0, range(heads), 0, range(n), 1)


def part(out: torch.Tensor, lse: torch.Tensor) -> Part:
    return Part(whole(out.shape[2], out.shape[1]), out, lse)


def nothing(n: int, dtype=torch.float32, log_dtype=torch.float64, d: int = 16) -> Partial:
    out = torch.full((1, n, 1, d), torch.nan, dtype=dtype, device=DEVICE)
    return Partial(out, torch.full((1, 1, n), torch.nan, dtype=log_dtype, device=DEVICE))


@pytest.mark.parametrize("window", [range(20), range(3, 20)])
def test_a_single_row_is_found_wherever_it_stands(window):
    for row in window:
        into = torch.full((1, 20, 1, 16), torch.nan, device=DEVICE)
        place = Place(range(1), 1, 0, range(1), 0, range(row, row + 1), 1)
        add_parts([Part(place, torch.ones(1, 1, 1, 16, device=DEVICE), None)], window, None, into)
        assert into[0, :, 0, 0].nonzero().flatten().tolist() == [*range(window.start), row]  # nan: not of the window


def test_rows_that_nobody_saw_are_zero_even_if_an_operation_left_nan_there():
    into = nothing(5)
    unseen = torch.full((1, 1, 5), -torch.inf, device=DEVICE)
    merge_parts([part(torch.full((1, 1, 5, 16), torch.nan, device=DEVICE), unseen)], range(5), None, into)
    assert into.out.eq(0).all()
    assert into.lse.eq(-torch.inf).all()


def test_no_parts_leave_what_was_there_and_otherwise_nothing():
    into = nothing(5)
    merge_parts([], range(5), None, into)
    assert into.out.eq(0).all()
    assert into.lse.eq(-torch.inf).all()
    into.out.fill_(3)
    into.lse.fill_(0.5)
    merge_parts([], range(5), into, into)
    assert into.out.eq(3).all()
    assert into.lse.eq(0.5).all()


def test_an_empty_window_writes_nothing():
    into = nothing(5)
    merge_parts([], range(3, 3), None, into)
    add_parts([], range(3, 3), None, into.out)
    assert into.out.isnan().all()


# the interpreter cuts bfloat16 off where a GPU rounds it
@pytest.mark.parametrize("dtype", [torch.float16, *[torch.bfloat16] * (DEVICE.type == "cuda")], ids=str)
def test_more_parts_than_a_launch_takes_are_rounded_once(dtype, monkeypatch):
    monkeypatch.setattr(module, "MERGED_AT_ONCE", 2)
    draw = torch.Generator().manual_seed(0)
    parts = [
        part(torch.randn(1, 1, 9, 16, generator=draw).to(DEVICE), torch.randn(1, 1, 9, generator=draw).to(DEVICE))
        for _ in range(9)
    ]
    fine, coarse = nothing(9), nothing(9, dtype, torch.float32)
    merge_parts(parts, range(9), None, fine)
    merge_parts(parts, range(9), None, coarse)
    assert coarse.out.equal(fine.out.to(dtype))
    assert coarse.lse.equal(fine.lse.float())
    want = eagerly_merged(parts, 9, 1)
    torch.testing.assert_close(fine.out.double(), want.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fine.lse.double(), want.lse.double(), rtol=1e-6, atol=1e-6)
    add_parts([one._replace(lse=None) for one in parts], range(9), None, fine.out)
    add_parts([one._replace(lse=None) for one in parts], range(9), None, coarse.out)
    assert coarse.out.equal(fine.out.to(dtype))
    torch.testing.assert_close(fine.out, sum(one.out for one in parts).transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_256_merges_leave_the_lse_as_exact_as_one():
    draw = torch.Generator().manual_seed(0)
    rows, count = 32, 256
    outs = torch.randn(count, 1, 1, rows, 16, generator=draw).to(DEVICE)
    lses = (20 + 3 * torch.randn(count, 1, 1, rows, generator=draw)).to(DEVICE)
    into = nothing(rows)
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        merge_parts([part(out, lse)], range(rows), into if i else None, into)
    want_lse = lses.double().logsumexp(0)
    want = ((lses.double() - want_lse).exp().unsqueeze(-1) * outs.double()).sum(0).transpose(1, 2)
    assert (into.lse - want_lse).abs().max() < 1e-12
    assert (into.out - want).norm() < 1e-6 * want.norm()  # 256 roundings to float32 take 5e-7


def test_parts_of_float64_stay_so():
    draw = torch.Generator().manual_seed(0)
    outs = torch.randn(3, 1, 1, 9, 16, generator=draw, dtype=torch.float64).to(DEVICE)
    lses = torch.randn(3, 1, 1, 9, generator=draw, dtype=torch.float64).to(DEVICE)
    into = nothing(9, torch.float64)
    merge_parts([part(*one) for one in zip(outs, lses, strict=True)], range(9), None, into)
    want = (lses.softmax(0).unsqueeze(-1) * outs).sum(0).transpose(1, 2)
    torch.testing.assert_close(into.out, want, rtol=1e-14, atol=1e-14)
    add_parts([part(*one)._replace(lse=None) for one in zip(outs, lses, strict=True)], range(9), want, into.out)
    torch.testing.assert_close(into.out, want + outs.sum(0).transpose(1, 2), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("at_home", [False, True])
@pytest.mark.parametrize("phase", range(4))
def test_rows_a_stride_apart_are_a_program(phase, at_home):
    """Steps 1, 2 and 4 as in LongNet, heads that start later and a window that starts anywhere: all are found."""
    n, heads = 72, 4
    places = [whole(n, heads)]
    places += [Place(range(1), 3, 24, range(h, 4, 2), 0, range(h, 24, 2), 1) for h in range(2)]
    places += [Place(range(1), 2, 36, range(heads), 1, range(0, 33, 4), 1)]
    parts = []
    for place in places:
        size = place.many, place.heads, len(place.rows)
        parts.append(Part(place, torch.randn(*size, 16, device=DEVICE), torch.randn(size, device=DEVICE)))
    assert module._stride(parts, torch.empty(1, n, heads, 16), 8) == 4
    into = Partial(torch.full((1, n, heads, 16), torch.nan, device=DEVICE), torch.zeros(1, heads, n, device=DEVICE))
    window = range(phase, n)
    want = eagerly_merged(parts, n, heads)
    if at_home:
        into.out.copy_(parts[0].out.transpose(1, 2))
        parts[0] = parts[0]._replace(out=into.out.transpose(1, 2))
        into.out[:, :phase] = torch.nan
    merge_parts(parts, window, None, into, is_first_at_home=at_home)
    torch.testing.assert_close(into.out[:, phase:].double(), want.out[:, phase:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(into.lse[..., phase:].double(), want.lse[..., phase:], rtol=1e-5, atol=1e-6)
    assert into.out[:, :phase].isnan().all()


def branches(n: int, heads: int, shift: int = 0) -> list[Place]:
    """Rates 1, 2 and 4 as in LongNet, all of whose segments are whole spans of 8 rows, 4 apart; and some rows alone."""
    found = [Place(range(1), 1, 0, range(heads), 0, range(shift, shift + n - 32), 1)]
    for h in range(2):
        found.append(Place(range(1), n // 64, 64, range(h, heads, 2), 0, range(shift + h, shift + 64, 2), 1))
    found.append(Place(range(1), n // 64, 64, range(heads), 1, range(shift, shift + 64, 4), 1))
    return found


def made_for(places: list[Place]) -> list[Part]:
    parts = []
    for place in places:
        size = place.many, place.heads, len(place.rows)
        parts.append(Part(place, torch.randn(*size, 16, device=DEVICE), torch.randn(size, device=DEVICE)))
    return parts


@pytest.mark.parametrize("at_home", [False, True])
@pytest.mark.parametrize(
    ("window", "shift", "is_even"),
    [
        (range(128), 0, True),
        (range(32, 96), 0, True),
        (range(4, 132), 4, True),
        (range(36, 68), 4, True),
        (range(128), 4, False),  # spans of the parts begin elsewhere
        (range(4, 128), 0, False),
        (range(122), 0, False),  # the last span is not whole
        (range(1, 129), 1, False),  # rows 1, 5, 9 ... of rate 4 begin with row -3
    ],
)
def test_where_parts_have_all_rows_of_a_program_or_none_the_first_answers_for_all(window, shift, is_even, at_home):
    n, heads = 128, 4
    parts = made_for(branches(n, heads, shift))
    known = module._known(parts, len(parts), torch.empty(1, n, heads, 16, device=DEVICE), 4, 8)
    assert known.is_even(window.start, len(window)) == is_even
    into = Partial(
        torch.full((1, n + 8, heads, 16), torch.nan, device=DEVICE), torch.zeros(1, heads, n + 8, device=DEVICE)
    )
    want = eagerly_merged(parts, n + 8, heads)
    added = torch.zeros_like(want.out)
    for place, out, _ in parts:
        place.view(added).add_(out.double())
    if at_home:
        home = parts[0].place.view(into.out)
        home.copy_(parts[0].out)
        parts[0] = parts[0]._replace(out=home)
    begun = into.out.clone()
    merge_parts(parts, window, None, into, is_first_at_home=at_home)
    inside = slice(window.start, window.stop)
    torch.testing.assert_close(into.out[:, inside].double(), want.out[:, inside], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(into.lse[..., inside].double(), want.lse[..., inside], rtol=1e-5, atol=1e-6)
    into.out.copy_(begun)
    sums = [part._replace(lse=None) for part in parts]
    add_parts(sums, window, None, into.out, is_first_at_home=at_home)
    torch.testing.assert_close(into.out[:, inside].double(), added[:, inside], rtol=1e-5, atol=1e-6)
    for outside in (slice(window.start), slice(window.stop, None)):
        torch.testing.assert_close(into.out[:, outside], begun[:, outside], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    "place",
    [
        Place(range(1), 2, 64, range(4), 0, range(32), 1),  # nobody has what lies between repeats
        Place(range(1), 1, 0, range(4), 0, range(40), 1),  # it ends within a span
        Place(range(1), 1, 0, range(4), 8, range(32), 1),  # heads begin in different places
        Place(range(1), 1, 0, range(4), 0, range(6, 70, 2), 1),  # its first row is not the first of its step
    ],
    ids=["gaps", "end", "skew", "start"],
)
def test_what_is_not_even(place):
    parts = made_for([*branches(128, 4), place])
    known = module._known(module._slots(parts), len(parts), torch.empty(1, 128, 4, 16, device=DEVICE), 4, 8)
    assert not known.is_even(0, 128)


def test_rows_too_far_apart_for_32_bits_are_not_even():
    for stride, is_even in ((16, True), (1 << 25, True), (1 << 26, False)):
        out = torch.empty_strided((1, 1, 64, 16), (0, 0, stride, 1), device="meta")
        known = module._known([Part(whole(64), out, None)], 1, torch.empty(1, 64, 1, 16, device=DEVICE), 1, 32)
        assert known.is_even(0, 64) == is_even


def eagerly_merged(parts: list[Part], n: int, heads: int) -> Partial:
    total = nothing_seen(torch.empty(1, n, heads, 16, dtype=torch.float64, device=DEVICE))
    for place, out, lse in parts:
        merge_(place.view(total.out), place.row_view(total.lse), out.double(), lse.double())
    return total


def test_a_division_by_multiplication_is_exact():
    for divisor in [*range(1, 70), 127, 128, 4095, 4097, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1]:
        factor, shift = module._reciprocal(divisor)
        ends = {k * divisor + i for k in (0, 1, 2, 3, 1000, (2**31 - 1) // divisor) for i in (-1, 0, 1)}
        for x in {*ends, 2**31 - 1, 2**31 - 2, 2**30}:
            if 0 <= x < 2**31:
                assert (2 * x * factor >> 32) >> shift == x // divisor
                assert factor < 2**32


def test_a_warm_call_makes_no_table(monkeypatch):
    into = nothing(5)
    parts = [part(torch.ones(1, 1, 5, 16, device=DEVICE), torch.zeros(1, 1, 5, device=DEVICE))]
    merge_parts(parts, range(5), None, into)
    monkeypatch.setattr(module, "_seat", None)
    merge_parts(parts, range(5), into, into)
    assert into.out.eq(1).all()


def test_a_part_of_another_shape_than_its_place_is_refused():
    wrong = Part(whole(4), torch.ones(1, 1, 5, 16, device=DEVICE), torch.zeros(1, 1, 5, device=DEVICE))
    with pytest.raises(ValueError, match=r"\(1, 1, 4, 16\).*got \(1, 1, 5, 16\)"):
        merge_parts([wrong], range(5), None, nothing(5))
    with pytest.raises(ValueError, match="got d = 1025"):
        add_parts([], range(5), None, nothing(5, d=1025).out)
