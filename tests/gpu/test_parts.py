"""The fused merge and sum, compiled: larger random places, offsets beyond 2**31, other streams, no waiting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longring.kernels.places import Part, Place
from longring.numerics.online_softmax import Partial
from never_waiting import never_waiting
from random_parts import Case, added, cases, merged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # a kernel is compiled for every combination of dtypes, a second each
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

pytest.importorskip("triton", reason="needs the triton package")
module = pytest.importorskip("longring.kernels.triton.parts")
merge_parts, add_parts = module.merge_parts, module.add_parts

GPU = torch.device("cuda", 0)


@given(cases(3000, widths=[64, 80, 128]), st.sampled_from([torch.float64, torch.float32]))
def test_a_merge_is_what_all_saw_together(case: Case, log_dtype):
    made = case.tensors(GPU, log_dtype)
    want = merged(made)
    merge_parts(made.parts, case.window, made.before, made.into)
    made.assert_merged(want)


@given(cases(3000, widths=[64, 80, 128]))
def test_a_sum_is_what_all_add_up_to(case: Case):
    made = case.tensors(GPU, torch.float64)
    want = added(made)
    add_parts(made.sums, case.window, made.before and made.before.out, made.into.out)
    made.assert_added(want)


@pytest.mark.parametrize("d", [1, 8, 33, 256, 512, 1000, 1024])
def test_any_width(d):
    place = Place(range(1), 3, 700, range(2), 5, range(3, 600, 4), 1)
    case = Case(2200, 1, 2, d, (place,) * 3, (torch.bfloat16,) * 3, range(1, 2190), "in place", torch.float32, False, 7)
    made = case.tensors(GPU, torch.float64)
    want = merged(made)
    merge_parts(made.parts, case.window, made.before, made.into)
    made.assert_merged(want)


def test_offsets_beyond_32_bits():
    """5 GB of bfloat16 in the part and as much in the target; the rows at the end count from 2.4e9 numbers on."""
    n, heads, d = 1_200_000, 16, 128
    if torch.cuda.mem_get_info(GPU)[0] < 14 << 30:
        pytest.skip("needs 14 GiB of free GPU memory")
    part = torch.empty(1, n, heads, d, dtype=torch.bfloat16, device=GPU).fill_(7)
    part[:, -100:] = torch.arange(100, device=GPU).view(1, -1, 1, 1)
    part[..., 1] = torch.arange(heads, device=GPU).view(1, 1, -1)
    lse = torch.zeros(1, n, heads, device=GPU)
    into = Partial(torch.empty_like(part), torch.empty(1, heads, n, device=GPU))
    place = Place(range(1), 1, 0, range(heads), 0, range(n), 1)
    whole = Part(place, part.transpose(1, 2), lse.transpose(1, 2))
    merge_parts([whole], range(n), None, into)
    assert into.out.equal(part)
    assert into.lse.eq(0).all()
    add_parts([whole._replace(lse=None)], range(n), None, into.out)
    assert into.out.equal(part)


def test_more_batch_rows_than_an_axis_of_a_grid_has():
    batch, n = 70_000, 3
    place = Place(range(batch), 1, 0, range(2), 0, range(n), 1)
    numbers = (
        torch.arange(batch, device=GPU, dtype=torch.float32).view(-1, 1, 1, 1).expand(batch, 2, n, 16).contiguous()
    )
    parts = [Part(place, numbers * factor, torch.zeros(batch, 2, n, device=GPU)) for factor in (1, 3)]
    into = Partial(torch.empty(batch, n, 2, 16, device=GPU), torch.empty(batch, 2, n, device=GPU))
    merge_parts(parts, range(n), None, into)
    assert into.out.equal(2 * numbers.transpose(1, 2))
    add_parts([part._replace(lse=None) for part in parts], range(n), None, into.out)
    assert into.out.equal(4 * numbers.transpose(1, 2))


@pytest.mark.parametrize("tokens", [1 << 17, 118784])
def test_longnet_is_merged_alike_whether_parts_are_even_or_not(tokens):
    """A window that begins elsewhere is never even, the whole is, also where its end cuts the long segments short."""
    heads, d = 16, 128
    draw = torch.Generator(GPU).manual_seed(0)
    places = [Place(range(1), tokens // 2048, 2048, range(heads), 0, range(2048), 1)]
    for i in range(1, 5):
        rate, segment = 1 << i, 2048 << i
        for first in range(heads // rate):
            down = range(first, heads, heads // rate)
            places.append(Place(range(1), tokens // segment, segment, down, 1, range(0, segment, rate), 1))
    parts = []
    for place in places:
        size = place.many, place.heads, len(place.rows)
        out = torch.randn(*size, d, generator=draw, device=GPU).bfloat16()
        parts.append(Part(place, out, torch.randn(size, generator=draw, device=GPU)))
    whole, shifted = (
        Partial(torch.empty(1, tokens, heads, d, device=GPU), torch.empty(1, heads, tokens, device=GPU)) for _ in "ab"
    )
    merge_parts(parts, range(tokens), None, whole)
    merge_parts(parts, range(1, tokens), None, shifted)
    assert whole.out[:, 1:].equal(shifted.out[:, 1:])
    assert whole.lse[..., 1:].equal(shifted.lse[..., 1:])
    sums = [part._replace(lse=None) for part in parts]
    add_parts(sums, range(tokens), None, whole.out)
    add_parts(sums, range(1, tokens), None, shifted.out)
    assert whole.out[:, 1:].equal(shifted.out[:, 1:])


def on_one_head(value: float) -> Part:
    out = torch.full((1, 1, 64, 128), value, device=GPU)
    return Part(Place(range(1), 1, 0, range(1), 0, range(64), 1), out, torch.zeros(1, 1, 64, device=GPU))


def accumulator() -> Partial:
    return Partial(torch.zeros(1, 64, 1, 128, device=GPU), torch.zeros(1, 1, 64, dtype=torch.float64, device=GPU))


def test_a_warm_call_does_not_wait_for_the_gpu():
    into = accumulator()
    merge_parts([on_one_head(1)], range(64), None, into)
    add_parts([on_one_head(1)._replace(lse=None)], range(64), None, into.out)
    parts = [on_one_head(3)]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), never_waiting():  # another one than the tables were used on
        merge_parts(parts, range(64), None, into)
        add_parts(parts, range(64), into.out, into.out)
    torch.cuda.synchronize()
    assert into.out.eq(6).all()


def captured(parts, into):
    """A graph of the merge, which has run once: tables are made then, and a capture may not wait for their copies."""
    merge_parts(parts, range(64), into, into)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_parts(parts, range(64), into, into)
    return graph


def test_a_merge_can_be_captured_once_it_has_run():
    into, parts = accumulator(), [on_one_head(1)]
    graph = captured(parts, into)
    into.out.zero_()
    into.lse.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(into.out, torch.full_like(into.out, 0.75))
    torch.testing.assert_close(into.lse.exp(), torch.full_like(into.lse, 4.0))


def test_a_captured_merge_outlives_what_is_remembered_of_it():
    into, parts = accumulator(), [on_one_head(1)]
    graph = captured(parts, into)
    module._made.cache_clear()
    torch.cuda.synchronize()
    rubbish = [torch.full((size,), -1, dtype=torch.int64, device=GPU) for size in range(1, 2000)]
    into.out.zero_()
    into.lse.zero_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(into.out, torch.full_like(into.out, 0.5))
    del rubbish


def test_256_merges_leave_the_lse_as_exact_as_one():
    draw = torch.Generator(GPU).manual_seed(0)
    rows, count = 512, 256
    outs = torch.randn(count, 1, 4, rows, 128, generator=draw, device=GPU).bfloat16()
    lses = 20 + 3 * torch.randn(count, 1, 4, rows, generator=draw, device=GPU)
    place = Place(range(1), 1, 0, range(4), 0, range(rows), 1)
    into = Partial(torch.empty(1, rows, 4, 128, device=GPU), torch.empty(1, 4, rows, dtype=torch.float64, device=GPU))
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        merge_parts([Part(place, out, lse)], range(rows), into if i else None, into)
    want_lse = lses.double().logsumexp(0)
    want = ((lses.double() - want_lse).exp().unsqueeze(-1) * outs.double()).sum(0).transpose(1, 2)
    assert (into.lse - want_lse).abs().max() < 1e-12
    assert (into.out - want).norm() < 1e-6 * want.norm()
