"""Totals are what their parts come to, in whatever order one adds, looks and rounds: at once, and as late as can be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import random_parts
from longring.geometry.ranges import cut, moved
from longring.kernels import totals
from longring.kernels.places import Part, Place
from longring.kernels.totals import Seen, Sum, Sums, is_lazy
from longring.numerics.online_softmax import Partial, accumulator_dtype, log_dtype

parts_module = pytest.importorskip("longring.kernels.triton.parts", reason="needs the package triton")

N, BATCH, KV_HEADS, D = 24, 2, 3, 16
CPU, GPU = torch.device("cpu"), torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.fixture(params=["at once", "late"], scope="module")
def device(request):
    """Where every part is merged at once, and where parts wait: a GPU, or Triton's interpreter."""
    is_late = request.param == "late"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(totals, "is_lazy", lambda _: is_late)
        yield GPU if is_late else CPU


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(totals, "is_lazy", lambda _: True)
    return GPU


@pytest.fixture
def passes(monkeypatch):
    """How many parts each fused pass took."""
    taken: list[int] = []
    for name in ("merge_parts", "add_parts"):
        whole_pass = getattr(parts_module, name)

        def counted(parts, *rest, whole_pass=whole_pass, **more):
            taken.append(len(parts))
            whole_pass(parts, *rest, **more)

        monkeypatch.setattr(parts_module, name, counted)
    return taken


# ----------------------------------------------------------------------------------------------- parts to add up


def like(dtype, device, share=1, n=N) -> torch.Tensor:
    return torch.empty(BATCH, n, KV_HEADS * share, D, dtype=dtype, device=device)


def everything(x: torch.Tensor, share=1) -> Place:
    return Place(range(x.shape[0]), 1, 0, range(x.shape[2] // share), 0, range(x.shape[1]), share)


def made(place: Place, device, dtype, seed: int) -> Part:
    """Random numbers for a place; a row in five saw nothing."""
    draw = torch.Generator().manual_seed(seed)
    size = place.many, place.heads, len(place.rows)
    out, lse = torch.randn(*size, D, generator=draw), torch.randn(size, generator=draw) * 5
    unseen = torch.rand(size, generator=draw) < 0.2
    out, lse = out.masked_fill(unseen.unsqueeze(-1), 0), lse.masked_fill(unseen, -torch.inf)
    return Part(place, out.to(device, dtype), lse.to(device, accumulator_dtype(dtype)))


def made_for(x: torch.Tensor, places: list[Place], seed: int = 0) -> list[Part]:
    """As operations bring them: on a GPU in x's dtype, on the CPU in the accumulator's."""
    dtype = x.dtype if totals.is_lazy(x.device) else accumulator_dtype(x.dtype)
    return [made(place, x.device, dtype, seed + i) for i, place in enumerate(places)]


def kept(parts: list[Part]) -> list[Part]:
    return [part._replace(out=part.out.clone(), lse=part.lse.clone()) for part in parts if part.lse is not None]


def tell(seen: Seen, part: Part) -> None:
    assert part.lse is not None
    seen.add(part.place, part.out, part.lse)


def exact(parts: list[Part], x: torch.Tensor) -> Partial:
    """All of them under one softmax, in float64."""
    batch, n, heads, _ = x.shape
    weight = torch.zeros(batch, heads, n, dtype=torch.float64, device=x.device)
    weighted = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for place, out, lse in parts:
        assert lse is not None
        place.row_view(weight).add_(lse.double().exp())
        place.view(weighted).add_(lse.double().exp().unsqueeze(-1) * out.double())
    seen = weight.mT.unsqueeze(-1)
    return Partial(torch.where(seen > 0, weighted / seen, 0), weight.log())


def exact_sum(parts: list[Part], x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for place, out, _ in parts:
        place.view(total).add_(out.double())
    return total


def assert_near(got: torch.Tensor, want: torch.Tensor, wide: torch.dtype) -> None:
    """To the rounding of its own dtype, cut off where Triton's interpreter does so, and that of some sums."""
    rounding = torch.finfo(got.dtype).eps if got.dtype.itemsize == 2 else 0
    near = {torch.float32: 2e-5, torch.float64: 1e-12}[wide]
    torch.testing.assert_close(got.double(), want, rtol=rounding + near, atol=near)


def assert_same(got: Partial, want: Partial, dtype: torch.dtype) -> None:
    wide = accumulator_dtype(dtype)
    assert_near(got.out, want.out, wide)
    assert_near(got.lse, want.lse, wide)


LOOK = "look"


@st.composite
def scripts(draw, share: int) -> list[Place | str]:
    """Places to add to, with looks at the total between them."""
    some = random_parts.places(N, BATCH, KV_HEADS, share)
    x = torch.empty(BATCH, N, KV_HEADS * share, D)
    return draw(st.lists(some | some | st.just(everything(x, share)) | st.just(LOOK), max_size=6))


# ------------------------------------------------------------------------------------------ in any order, exactly


@settings(max_examples=25)
@given(data=st.data(), share=st.integers(1, 2), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_what_was_seen_is_one_softmax_over_all_parts(device, data, share, dtype, seed):
    q = like(dtype, device, share)
    script = data.draw(scripts(share))
    parts = made_for(q, [step for step in script if isinstance(step, Place)], seed)
    originals, coming, so_far = kept(parts), iter(parts), 0
    seen = Seen(q)
    assert seen.is_empty
    for step in script:
        if isinstance(step, Place):
            tell(seen, next(coming))
            so_far += 1
        else:
            total = seen.in_place()
            assert (total.out.dtype, total.lse.dtype) == (accumulator_dtype(dtype), log_dtype(device))
            assert_same(total, exact(originals[:so_far], q), dtype)
    assert seen.is_empty == (not script)
    for _ in range(2):
        assert_same(seen.result(), exact(originals, q), dtype)


@settings(max_examples=25)
@given(data=st.data(), share=st.integers(1, 2), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_a_sum_is_that_of_all_parts(device, data, share, dtype, seed):
    x = like(dtype, device, share)
    script = data.draw(scripts(share))
    parts = made_for(x, [step for step in script if isinstance(step, Place)], seed)
    originals, coming, so_far = kept(parts), iter(parts), 0
    into = torch.full(x.shape, torch.nan, dtype=accumulator_dtype(dtype), device=device)
    rooms = [{}, {"room": lambda: into}]
    found = Sum(x, **data.draw(st.sampled_from(rooms)))
    assert found.is_empty
    for step in script:
        if isinstance(step, Place):
            found.add(step, next(coming).out)
            so_far += 1
        else:
            total = found.in_place()
            assert total.dtype == accumulator_dtype(dtype)
            assert_near(total, exact_sum(originals[:so_far], x), accumulator_dtype(dtype))
    assert found.is_empty == (not script)
    for _ in range(2):
        assert_near(found.result(), exact_sum(originals, x), accumulator_dtype(dtype))


@settings(max_examples=20)
@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    windows=st.integers(1, 4),
    few=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_that_are_done_stay_as_they_are(data, dtype, windows, few, seed):
    """Window by window, in which parts wait or do not, and rows without any part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(totals, "is_lazy", lambda _: True)
        if few:
            patch.setattr(totals, "_are_too_many", lambda parts, *_: len(parts) > 1)
        q = like(dtype, GPU)
        seen, found = Seen(q, is_one_look=True), Sum(q, is_one_look=True)
        originals: list[Part] = []
        for window in cut(N, windows):
            some = random_parts.places(len(window), BATCH, KV_HEADS, 1)
            places = [
                place._replace(rows=moved(place.rows, window.start)) for place in data.draw(st.lists(some, max_size=4))
            ]
            parts = made_for(q, places, seed + len(originals))
            originals += kept(parts)
            for part in parts:
                tell(seen, part)
                found.add(part.place, part.out)
            seen.rows_done(window)
            found.rows_done(window)
            assert not seen.is_empty
            assert not found.is_empty
        for _ in range(2):
            assert seen.result().out.dtype == found.result().dtype == dtype
            assert_same(seen.result(), exact(originals, q), dtype)
            assert_near(found.result(), exact_sum(originals, q), accumulator_dtype(dtype))


# ------------------------------------------------------------------------------------------------- rows unseen


def test_nothing_at_all_is_zero_and_minus_infinity(device):
    q = like(torch.float32, device)
    for total in (Seen(q).in_place(), Seen(q).result()):
        assert total.out.eq(0).all()
        assert total.lse.eq(-torch.inf).all()
    assert Sum(q).in_place().eq(0).all()
    assert Sum(q).result().eq(0).all()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_row_that_saw_nothing_in_one_part_is_the_other(device, order):
    q = like(torch.float32, device)
    parts = made_for(q, [everything(q)] * 2)
    _, out, lse = parts[1]
    assert lse is not None
    both = [parts[0], Part(everything(q), torch.zeros_like(out), torch.full_like(lse, -torch.inf))]
    originals, seen = kept(both), Seen(q)
    for i in order:
        tell(seen, both[i])
    assert_same(seen.result(), exact(originals[:1], q), q.dtype)


# ------------------------------------------------------------------------------------------ how late, and how often


def test_one_part_of_everything_is_handed_out_as_it_is(device, passes):
    q = like(torch.bfloat16, device)
    (part,) = made_for(q, [everything(q)])
    seen, found = Seen(q), Sum(q)
    tell(seen, part)
    found.add(part.place, part.out)
    assert part.lse is not None
    for _ in range(2):
        assert seen.result().out.data_ptr() == found.result().data_ptr() == part.out.data_ptr()
        assert seen.result().lse.data_ptr() == part.lse.data_ptr()
        assert seen.result().out.shape == found.result().shape == q.shape
    assert passes == []


def test_half_of_everything_is_not_the_result(device):
    q = like(torch.float32, device)
    (part,) = made_for(q, [everything(q)._replace(rows=range(N // 2))])
    (original,) = kept([part])
    seen = Seen(q)
    tell(seen, part)
    assert_same(seen.result(), exact([original], q), q.dtype)


def test_parts_wait_for_one_pass(late, passes):
    q = like(torch.bfloat16, late)
    parts = made_for(q, [everything(q)] * 7)
    seen, found = Seen(q), Sum(q)
    for part in parts:
        tell(seen, part)
        found.add(part.place, part.out)
    assert passes == []
    assert seen.result().out.dtype == found.result().dtype == torch.bfloat16
    assert passes == [7, 7]


@pytest.mark.parametrize(("held", "want"), [(1, [2, 2, 2, 1]), (2, [3, 3, 1]), (6, [7])])
def test_no_more_than_so_many_wait(late, passes, monkeypatch, held, want):
    for name in ("HELD", "HELD_OF_SUMS", "HELD_UNTIL_DONE"):
        monkeypatch.setattr(totals, name, held)
    monkeypatch.setattr(totals, "ALWAYS_HELD", 1)
    q = like(torch.bfloat16, late)
    parts = made_for(q, [everything(q)] * 7)
    originals, seen, found = kept(parts), Seen(q), Sum(q)
    for part in parts:
        tell(seen, part)
    assert_same(seen.result(), exact(originals, q), q.dtype)
    assert passes == want
    passes.clear()
    for part in parts:
        found.add(part.place, part.out)
    assert_near(found.result(), exact_sum(originals, q), torch.float32)
    assert passes == want


@pytest.mark.parametrize(("is_one_look", "want"), [(True, [3, 3, 1]), (False, [2, 2, 2, 1])])
def test_gradients_of_one_look_wait_longer(late, passes, monkeypatch, is_one_look, want):
    """As long as they weigh no more than the total that they would be summed up in."""
    monkeypatch.setattr(totals, "ALWAYS_HELD", 1)
    q = like(torch.bfloat16, late)
    parts = made_for(q, [everything(q)] * 7)
    originals, found = kept(parts), Sum(q, is_one_look=is_one_look)
    for part in parts:
        found.add(part.place, part.out)
    assert_near(found.result(), exact_sum(originals, q), torch.float32)
    assert passes == want


def test_small_parts_wait_whatever_the_total_is(late, passes, monkeypatch):
    for name in ("HELD", "HELD_OF_SUMS", "HELD_UNTIL_DONE"):
        monkeypatch.setattr(totals, name, 0)
    q = like(torch.bfloat16, late)
    monkeypatch.setattr(totals, "ALWAYS_HELD", 3 * q.nbytes)
    seen = Seen(q)
    for part in made_for(q, [everything(q)] * 3):
        tell(seen, part)
    assert passes == []
    tell(seen, made_for(q, [everything(q)])[0])
    assert passes == [4]


def test_a_single_part_waits_however_large(late, passes, monkeypatch):
    for name in ("HELD", "HELD_OF_SUMS", "HELD_UNTIL_DONE", "ALWAYS_HELD"):
        monkeypatch.setattr(totals, name, 0)
    q = like(torch.float32, late)
    seen = Seen(q)
    tell(seen, made_for(q, [everything(q)])[0])
    assert passes == []


def test_rows_can_be_done_only_where_parts_wait_and_nothing_else_comes(device):
    q = like(torch.float32, device)
    is_late = totals.is_lazy(device)
    for one in (Seen(q, is_one_look=True), Sum(q, is_one_look=True), *Sums.of(q, q, is_one_look=True)):
        assert one.can_be_done == is_late
    for one in (Seen(q), Sum(q), Sum.on(q), *Sums.of(q, q)):
        assert not one.can_be_done


def test_parts_wait_on_a_gpu_alone():
    assert not is_lazy(CPU)
    assert not is_lazy(torch.device("meta"))


# --------------------------------------------------------------------------------------------- memory of somebody else


@pytest.mark.parametrize("rows", [range(N), range(5, 20)], ids=["everything", "some rows"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_sum_lies_in_the_room_it_was_given(device, rows, count):
    x = like(torch.bfloat16, device)
    into = torch.full(x.shape, torch.nan, device=device)
    asked: list[None] = []
    found = Sum(x, room=lambda: asked.append(None) or into)
    parts = made_for(x, [everything(x)._replace(rows=rows)] * count)
    originals = kept(parts)
    assert not asked
    for part in parts:
        found.add(part.place, part.out)
    assert found.in_place().data_ptr() == into.data_ptr()
    assert found.in_place() is found.in_place()
    assert len(asked) == 1
    assert_near(into, exact_sum(originals, x), torch.float32)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_sum_goes_onto_what_another_found(late, passes, count):
    """What is computed waits for what travels, and both are added up in one pass, where that came."""
    x = like(torch.bfloat16, late)
    theirs = torch.randn(x.shape).to(late)
    parts = made_for(x, [everything(x)] * count)
    want = exact_sum(kept(parts), x) + theirs.double()
    found = Sum(x, room=lambda: pytest.fail("room was asked for, though there is some"))
    for part in parts:
        found.add(part.place, part.out)
    assert found.can_go_onto(theirs)
    found.go_onto(theirs)
    assert found.in_place().data_ptr() == theirs.data_ptr()
    assert_near(theirs, want, torch.float32)
    assert passes == ([count] if count else [])


def test_a_sum_that_was_begun_goes_onto_nothing(late):
    x = like(torch.bfloat16, late)
    theirs, narrow = torch.zeros(x.shape, device=late), torch.zeros(BATCH, 2, KV_HEADS, D, device=late)
    begun, done = Sum(x), Sum(x, is_one_look=True)
    begun.in_place()
    done.rows_done(range(N))
    assert not begun.can_go_onto(theirs)
    assert not done.can_go_onto(theirs)
    assert not Sum(x).can_go_onto(narrow)


def test_where_nothing_waits_a_sum_goes_onto_nothing(monkeypatch):
    monkeypatch.setattr(totals, "is_lazy", lambda _: False)
    x = like(torch.float32, CPU)
    assert not Sum(x).can_go_onto(torch.zeros(x.shape))


def test_a_sum_adds_to_what_there_is(device):
    total = torch.randn(BATCH, N, KV_HEADS, D).to(device)
    parts = made_for(total, [everything(total), everything(total)._replace(rows=range(3, 9))])
    want = exact_sum(kept(parts), total) + total.double()
    found = Sum.on(total)
    assert not found.is_empty
    for part in parts:
        found.add(part.place, part.out)
    found.handed_back()
    assert_near(total, want, torch.float32)
    assert found.result().data_ptr() == total.data_ptr()


@pytest.mark.parametrize("before", [0, 1, 2], ids="{} parts before".format)
def test_a_sum_of_some_heads_counts_once_it_was_handed_back(device, before):
    """Grouped desks take turns with a tensor of all heads."""
    x = like(torch.bfloat16, device)
    found = Sum(x)
    parts = made_for(x, [everything(x)] * before)
    want = exact_sum(kept(parts), x)
    for part in parts:
        found.add(part.place, part.out)
    for heads in (slice(0, 1), slice(1, 3), slice(1, 3)):
        view = x[:, :, heads]
        (part,) = made_for(view, [everything(view)], seed=heads.start + 7)
        want[:, :, heads] += exact_sum(kept([part]), view)
        some = found.of_heads(heads)
        assert some.shape == view.shape
        some.add(part.place, part.out)
        some.handed_back()
    assert_near(found.result(), want, torch.float32)


def test_a_sum_of_all_heads_is_the_sum_itself(late, passes):
    x = like(torch.bfloat16, late)
    found = Sum(x)
    assert found.of_heads(slice(None)) is found
    for part in made_for(x, [everything(x)] * 2):
        found.add(part.place, part.out)
    found.handed_back()
    assert passes == []  # its parts go on waiting: nobody else looks at it


def test_gradients_have_the_shapes_of_what_they_are_of():
    q, k = like(torch.float32, CPU, share=2), like(torch.float32, CPU, n=5)
    assert [one.shape for one in Sums.of(q, k)] == [q.shape, k.shape, k.shape]
