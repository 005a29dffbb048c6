"""Stacks that one launch computes: what comes of them is the definition, and who goes together is a matter of time."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import longring as lr
import stacking
from attending import keeps_the_budget, tensors
from choices import forget_choices
from longring.geometry.itinerary import tiles_between
from longring.geometry.layouts import deal, from_ranges
from longring.geometry.packs import Pack
from longring.geometry.patterns import Problem
from longring.geometry.portions import with_bands
from longring.geometry.task import Task, tiles_over_all_keys
from longring.kernels import fused, recipes, select, totals
from longring.kernels.fused import FusedKernel
from longring.kernels.operations import cuda
from longring.kernels.operations.cpu import CpuFlash
from longring.kernels.operations.cuda import Flash
from longring.kernels.operations.flash_attn import FlashAttn2, FlashAttn3, FlashAttn4
from longring.kernels.operations.triton import TritonTiles
from longring.kernels.recipes import Alone, Asked, Together, settled_recipe
from longring.schedules.select import SCHEDULES
from longring.testing import Result, judge
from many_at_once import ManyAtOnce

pytest.importorskip("longring.kernels.triton.parts", reason="needs the package triton")

import triton

from interpreted import mended_interpreter
from longring.kernels.triton import tiles
from longring.kernels.triton.parts import BLOCKS

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs Triton's interpreter")

N = 24
PATTERNS = {
    "full": lr.Dense(causal=False),
    "window": lr.Dense(window=(5, 0)),
    "documents": lr.Dense(documents=[[0, 7, 8, N], [0, 12, 18, N]]),
    "lengths": lr.Dense(lengths=[17, N]),
    "mod": lr.Dilated([4, 8, 16], [1, 2, 4]),
    "block": lr.Dilated([4, 12], [2, 3], causal=False, phase="block"),
}
pytestmark = [pytestmark, pytest.mark.filterwarnings("ignore::longring.errors.RowsLeftOut")]


@pytest.fixture(autouse=True)
def lazy(monkeypatch):
    for module in (totals, fused):
        monkeypatch.setattr(module, "is_lazy", lambda _: True)
    forget_choices()
    yield
    forget_choices()


@pytest.fixture
def many(monkeypatch):
    """`auto` is two operations of the CPU, one of which takes many stacks at once, and takes what it can get."""
    operation = ManyAtOnce()
    monkeypatch.setattr(select, "_choose", lambda *_: (FusedKernel("both", [CpuFlash(), operation]), "for a test"))
    take(monkeypatch, lambda alone, uncut: ([], [one.stack for one in alone]))
    return operation


def take(monkeypatch, divided) -> None:
    """Whatever it may cost: of stacks by themselves, and uncut, those to be left so, and those to go together."""

    def ways(operation, alone, costs, uncut, slab, asked):
        some, others = divided(alone, uncut)
        yield recipes._in_one_launch(-1.0, some, others, operation, slab, asked)

    monkeypatch.setattr(recipes, "_of_anything", ways)


def check(pattern, **options) -> None:
    keeps_the_budget(pattern, N, **options)


# ------------------------------------------------------------------------------------------------ what comes of it


@pytest.fixture
def uncut(many, monkeypatch):
    """And it takes bands as they are."""
    take(monkeypatch, lambda alone, uncut: ([], uncut))
    return many


WINDOWS = {
    "left": lr.Dense(window=(5, 0)),
    "both": lr.Dense(causal=False, window=(3, 4)),
    "none": lr.Dense(causal=False, window=(0, 0)),
    "wide": lr.Dense(window=(19, 0)),
    "in documents": lr.Dense(window=(4, 0), documents=[0, 9, N]),
    "in lengths": lr.Dense(causal=False, window=(2, 7), lengths=[13, N]),
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_windows_uncut(window, heads, uncut):
    check(WINDOWS[window], heads=heads)
    shapes = {stack.shape for pack in uncut.packs for stack in pack.stacks}
    assert "band" in shapes


def test_a_window_uncut_is_not_merged(uncut, monkeypatch):
    monkeypatch.setattr("longring.kernels.triton.parts.merge_parts", lambda *_, **__: pytest.fail("merged"))
    monkeypatch.setattr("longring.kernels.triton.parts.add_parts", lambda *_, **__: pytest.fail("added up"))
    check(WINDOWS["left"])
    assert [len(pack.stacks) for pack in uncut.packs] == [1, 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_windows_uncut_by_every_schedule(schedule, uncut):
    options = {"ranks": 4, "node_ranks": 2} if schedule in ("double_ring", "hybrid") else {"ranks": 3}
    check(WINDOWS["left"], schedule=schedule, layout="zigzag", heads=(4, 2), **options)
    assert uncut.packs


def test_queries_behind_a_cached_prefix_uncut(uncut):
    q, k, v, dout, _ = tensors(1, 9, N, 4, 2, 8, torch.float32)
    out, lse = lr.attention(q, k, v, return_lse=True)
    got = Result(out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout))
    verdicts = judge(got, q, k, v, lr.Dense(), dout)
    assert all(verdict.ok for verdict in verdicts), verdicts
    assert {stack.shape for pack in uncut.packs for stack in pack.stacks} == {"band"}


@pytest.mark.parametrize("pattern", [name for name in PATTERNS if name != "full"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_together_on_one_device(pattern, heads, many):
    check(PATTERNS[pattern], heads=heads)
    assert many.packs


def test_one_stack_is_not_many(many):
    check(PATTERNS["full"])
    assert not many.packs


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-35])
def test_any_scale(scale, many):
    check(PATTERNS["documents"], scale=scale)
    assert many.packs


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_together_by_every_schedule(schedule, many):
    options = {"ranks": 4, "node_ranks": 2} if schedule in ("double_ring", "hybrid") else {"ranks": 3}
    check(PATTERNS["documents"], schedule=schedule, layout="zigzag", heads=(4, 2), **options)
    assert many.packs


@pytest.mark.parametrize("ranks", [2, 5])
def test_documents_dealt_by_their_work(ranks, many):
    documents = [0, 3, 7, 8, 15, N]
    check(lr.Dense(documents=documents), batch=1, ranks=ranks, layout="dealt", schedule="ring")
    assert many.packs


def test_some_alone_and_some_together(many, monkeypatch):
    take(monkeypatch, lambda alone, uncut: (alone[:1], [one.stack for one in alone[1:]]))
    for pattern in ("documents", "window", "mod"):
        check(PATTERNS[pattern])
    assert many.packs


def test_slab_by_slab(many, monkeypatch):
    monkeypatch.setattr("longring.geometry.portions.SMALLEST_SLAB", 1)
    check(lr.Dilated([2, 4], [1, 2]))
    assert len(many.packs) > 2
    assert all(pack.queries.trays[0].place.rows != range(N) for pack in many.packs)


def test_what_need_not_wait_goes_at_once_however_long_it_is(many, monkeypatch):
    monkeypatch.setattr("longring.geometry.portions.SMALLEST_SLAB", 1)
    never = lambda *_, **__: pytest.fail("brought together")  # noqa: E731
    for name in ("merge_parts", "add_parts"):
        monkeypatch.setattr(f"longring.kernels.triton.parts.{name}", never)
    check(lr.Dense(documents=[*range(0, N, 2), N]))
    assert [len(pack.stacks) for pack in many.packs] == [2, 2]


def test_no_more_results_at_once_than_may_wait(many, monkeypatch):
    monkeypatch.setattr(recipes, "PACKED", 0)
    monkeypatch.setattr(recipes, "PACKED_IN_ANY_CASE", 2 * 10 * 4 * 8 * 4)  # ten rows of both batch rows
    check(PATTERNS["documents"])
    assert len(many.packs) > 2
    assert max(pack.queries.lines for pack in many.packs) <= 2 * 24 * 4  # or one stack that is more


def test_documents_on_one_device_are_not_merged(many, monkeypatch):
    monkeypatch.setattr("longring.kernels.triton.parts.merge_parts", lambda *_, **__: pytest.fail("merged"))
    monkeypatch.setattr("longring.kernels.triton.parts.add_parts", lambda *_, **__: pytest.fail("added up"))
    check(PATTERNS["documents"])
    check(PATTERNS["documents"], dtype=torch.bfloat16, with_dlse=False)
    assert len(many.packs) == 4


def test_results_lie_as_the_tensors_do(many):
    q, k, v, dout, _ = tensors(2, N, N, 4, 2, 8, torch.float32)
    out = lr.attention(q, k, v, pattern=PATTERNS["documents"])
    found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    assert len(many.packs) == 2
    assert all(x.is_contiguous() for x in found)


def test_our_own_kernel(monkeypatch):
    """In Triton, interpreted: by name it takes everything at once."""
    block = tiles.Blocks(16, 16, 4, 1)
    monkeypatch.setattr(tiles, "sizes_for", lambda q: tiles.Sizes(block, block, block))
    monkeypatch.setattr(TritonTiles, "refusal", lambda *_: None)
    launched: list[Pack] = []
    forward = TritonTiles.forward_many
    monkeypatch.setattr(TritonTiles, "forward_many", lambda self, *x: launched.append(x[3]) or forward(self, *x))
    monkeypatch.setattr(select, "_choose", lambda *_: (select.KERNELS["triton"], "for a test"))
    with mended_interpreter():
        for pattern in ("documents", "window", "mod"):
            check(PATTERNS[pattern], heads=(4, 2), d=16)
    assert [len(pack.stacks) > 1 for pack in launched] == [True, False, True]
    assert launched[1].stacks[0].shape == "band"


# ------------------------------------------------------------------------------------------------- who goes together


def steps(which, pattern, n, heads, d, *, kv_heads=None, packages=True):
    """What a GPU would do, as estimated; `packages`: with flash-attn-4, or with those that are given."""
    device = torch.device("cuda:0")
    kv_heads = kv_heads or heads
    q, k = (torch.Size((1, n, some, d)) for some in (heads, kv_heads))
    asked = Asked(which, q, k, torch.bfloat16, device, True, True, True)
    operations = installed(packages)
    found = [
        step
        for leg in settled_recipe(operations, tuple(stacking.pattern_tiles(pattern, 1, n, heads, kv_heads)), asked)
        for step in leg.steps
    ]
    alone = [step.stack for step in found if isinstance(step, Alone)]
    packs = [step.pack for step in found if isinstance(step, Together)]
    takers.clear()
    takers.extend(step.operation.name for step in found if isinstance(step, Together))
    return alone, packs


def installed(packages):
    given = packages if isinstance(packages, tuple) else (FlashAttn4(),) * packages
    return (*given, *select.TORCH[1:], TritonTiles())


takers: list[str] = []  # of the packs that `steps` found last


@pytest.fixture
def generation(monkeypatch):
    """Call it with one."""
    # nobody refuses: there is no GPU here to ask
    monkeypatch.setattr(recipes, "willing_for", lru_cache(lambda operations, *_: operations))
    monkeypatch.setattr(FlashAttn3, "_build_flags", lambda _: defaultdict(bool))
    return lambda kind: monkeypatch.setattr(recipes, "_generation", lambda _: kind)


@pytest.fixture
def hopper(generation):
    generation("hopper")


LONGNET = lr.Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
HUNDRED = lr.Dense(documents=[*range(0, 65536, 650), 65536])
UNLIKE = lr.Dense(documents=[0, *(i * (i + 1) * 6 for i in range(1, 104)), 65536])


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("packages", [True, False])
class TestOnHopper:
    def test_a_hundred_documents_go_together(self, hopper, which, packages):
        alone, (pack,) = steps(which, UNLIKE, 65536, 16, 128, packages=packages)
        assert len(alone) + len(pack.stacks) > 100
        assert len(alone) < 5
        (tray,) = pack.queries.trays
        assert tray.is_shared
        assert takers == ["flash_attn_4" if packages else "triton"]

    def test_one_large_stack_of_equal_ones_does_not(self, hopper, which, packages):
        alone, packs = steps(which, HUNDRED, 65536, 16, 128, packages=packages)
        assert len(alone) + sum(len(pack.stacks) for pack in packs) == 2

    @pytest.mark.parametrize(
        ("n", "heads", "d"), [(n, *of) for n in (1 << 20, 1 << 16) for of in ((16, 128), (12, 64))]
    )
    def test_longnet_as_it_was_measured_goes_branch_by_branch(self, hopper, which, packages, n, heads, d):
        _, packs = steps(which, LONGNET, n, heads, d, packages=packages)
        assert packs == []

    def test_few_long_documents_do_where_they_are_sequences(self, hopper, which, packages):
        alone, _ = steps(which, lr.Dense(documents=[0, 30000, 65536]), 65536, 16, 128, packages=packages)
        assert len(alone) == (0 if packages else 2)
        assert takers == ["flash_attn_4"] * packages

    def test_nor_do_dense_calls(self, hopper, which, packages):
        for n in (1024, 8192, 131072):
            assert steps(which, lr.Dense(), n, 16, 128, packages=packages)[1] == []


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(("n", "heads", "d"), [(n, *of) for n in (1 << 20, 1 << 16) for of in ((16, 128), (12, 64))])
def test_longnet_goes_branch_by_branch_with_flash_attn_3_too(hopper, which, n, heads, d):
    alone, packs = steps(which, LONGNET, n, heads, d, packages=(FlashAttn3(),))
    assert packs == []
    assert len(alone) >= 5


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("packages", [True, False])
@pytest.mark.parametrize(
    ("n", "ranks", "heads", "kv_heads"), [(1 << 17, p, *h) for p in (4, 8, 16) for h in ((16, 16), (32, 8))]
)
def test_a_ring_as_it_was_measured_goes_tile_by_tile(hopper, which, packages, n, ranks, heads, kv_heads):
    layout = deal("zigzag", n, ranks)
    task = Task(lr.Dense(), Problem(1, n, n, kv_heads, 0), layout, layout, heads)
    sizes = (torch.Size((1, n // ranks, some, 128)) for some in (heads, kv_heads))
    asked = Asked(which, *sizes, torch.bfloat16, torch.device("cuda:0"), True, False, False)
    operations = installed(packages)
    first = operations[0].name
    for source in range(ranks):
        (leg,) = settled_recipe(operations, tiles_between(task, 1, source), asked)
        assert {type(step) for step in leg.steps} == {Alone}
        assert {step.operation.name for step in leg.steps} == {first}


def test_gradients_of_keys_are_bounded_as_well(hopper):
    """Chunks dealt in turn, all keys at hand: few rows in each stack, and ever more keys."""
    n, heads, d, chunk = 65536, 16, 128, 256
    chunks = [[range(i, i + chunk) for i in range(rank * chunk, n, 2 * chunk)] for rank in range(2)]
    layout = from_ranges(chunks)
    task = Task(lr.Dense(), Problem(1, n, n, heads, 0), layout, layout, heads)
    sizes = torch.Size((1, n // 2, heads, d)), torch.Size((1, n, heads, d))
    asked = Asked("backward", *sizes, torch.bfloat16, torch.device("cuda:0"), True, True, False)
    (leg,) = settled_recipe((TritonTiles(),), tiles_over_all_keys(task, 1), asked)
    packs = [step.pack for step in leg.steps if isinstance(step, Together)]
    assert len(packs) > 10
    assert max(pack.keys.lines for pack in packs) <= 2 * n * heads
    assert sum(len(pack.stacks) for pack in packs) == len(with_bands(tiles_over_all_keys(task, 1), 1))


def test_what_a_recipe_is_for_is_in_its_key(hopper):
    one, other = (TritonTiles(), TritonTiles())
    tiles = stacking.pattern_tiles(lr.Dense(documents=[0, 100, 300]), 1, 300, 2, 2)
    size = torch.Size((1, 300, 2, 64))
    asked = Asked("forward", size, size, torch.bfloat16, torch.device("cuda:0"), True, True, True)
    for mine in (one, other):
        (leg,) = recipes.recipe((mine,), tiles, asked)
        assert {step.operation for step in leg.steps} == {mine}
    longer = asked._replace(k=torch.Size((1, 400, 2, 64)))
    (leg,) = recipes.recipe((one,), tiles, longer)
    assert leg.steps[0].pack.keys.trays[0].place.rows != range(300)


def test_a_short_longnet_goes_together(hopper):
    for which in ("forward", "backward"):
        _, packs = steps(which, LONGNET, 16384, 12, 64)
        assert sum(len(pack.stacks) for pack in packs) > 5


def test_a_large_document_beside_many_small_ones_has_a_launch_of_its_own(hopper):
    documents = [0, *(i * (i + 1) * 3 for i in range(1, 60)), 32768]
    alone, packs = steps("forward", lr.Dense(documents=documents), 32768, 16, 128, packages=False)
    assert [len(stack.queries.rows) for stack in alone] == [32768 - documents[-2]]
    assert sum(len(pack.stacks) for pack in packs) == 59


def test_narrow_windows_go_uncut_and_wide_ones_are_squares(hopper):
    for which in ("forward", "backward"):
        alone, packs = steps(which, lr.Dense(window=(511, 0)), 131072, 16, 128, packages=False)
        assert alone == []
        assert [[stack.shape for stack in pack.stacks] for pack in packs] == [["band"]]
        assert takers == ["triton"]
        alone, packs = steps(which, lr.Dense(window=(16383, 0)), 131072, 16, 128, packages=False)
        assert packs == []


@pytest.mark.parametrize("width", [100, 512, 4096, 16384, 32768])
@pytest.mark.parametrize(("heads", "d"), [(16, 128), (12, 64)])
def test_any_window_goes_uncut_to_who_knows_windows(hopper, width, heads, d):
    for which in ("forward", "backward"):
        alone, (pack,) = steps(which, lr.Dense(window=(width - 1, 0)), 131072, heads, d)
        assert alone == []
        assert [stack.shape for stack in pack.stacks] == ["band"]
        assert takers == ["flash_attn_4"]


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(
    ("kind", "packages", "taker"),
    [
        ("hopper", (FlashAttn3(),), "flash_attn_3"),
        ("hopper", (FlashAttn4(), FlashAttn3(), FlashAttn2()), "flash_attn_4"),
        ("hopper", (FlashAttn2(),), "triton"),  # flash-attn 2 knows nothing of Hopper, and ours was made there
        ("hopper", (), "triton"),
        ("ampere", (FlashAttn2(),), "flash_attn_2"),
        ("ampere", (), "flash"),
        ("blackwell", (FlashAttn4(),), "flash_attn_4"),
        ("blackwell", (), "triton"),
    ],
)
def test_who_takes_documents_and_windows(generation, kind, packages, taker, which):
    generation(kind)
    for pattern in (UNLIKE, lr.Dense(window=(511, 0))):
        steps(which, pattern, 65536, 16, 128, packages=packages)
        assert takers == [taker]


def test_a_gradient_of_lse_is_for_who_takes_it_as_it_is(generation):
    generation("ampere")
    size, device = torch.Size((1, 65536, 16, 128)), torch.device("cuda:0")
    tiles = tuple(stacking.pattern_tiles(UNLIKE, 1, 65536, 16, 16))
    for has_dlse, taker in ((False, "flash"), (True, "triton")):
        asked = Asked("backward", size, size, torch.bfloat16, device, True, True, True, has_dlse)
        (leg,) = settled_recipe(installed(()), tiles, asked)
        assert {step.operation.name for step in leg.steps if isinstance(step, Together)} == {taker}


def test_the_edge_of_a_window_is_not_turned_round_by_who_knows_windows(hopper):
    """What a rank sees of its neighbour's keys, a triangle: read backwards it would be copied first."""
    n, heads, d = 65536, 16, 128
    layout = deal("contiguous", n, 2)
    task = Task(lr.Dense(window=(511, 0)), Problem(1, n, n, heads, 0), layout, layout, heads)
    size = torch.Size((1, n // 2, heads, d))
    asked = Asked("forward", size, size, torch.bfloat16, torch.device("cuda:0"), True, False, False)
    (leg,) = settled_recipe(installed(True), tiles_between(task, 1, 0), asked)
    (step,) = leg.steps
    assert step.stacks[0].shape == "flipped"
    assert isinstance(step, Together)
    assert step.operation.name == "flash_attn_4"


def test_the_host_may_be_slow_while_the_device_is_busy(hopper):
    documents = [0, *(i * (i + 1) * 3 for i in range(1, 60)), 98304]
    _, packs = steps("forward", lr.Dense(documents=documents), 98304, 16, 128, packages=False)
    assert packs == []


# ------------------------------------------------------------------------------------------ nothing is left out


CHUNKS = [9, 11, 11, 9, 10, 10, 11, 10, 10, 9, 10, 10, 11, 10, 10, 10, 10, 10, 3]


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["ampere", "hopper"])
@pytest.mark.parametrize("among", ["flash", "torch's", "all"])
def test_what_is_not_taken_is_not_left_out(generation, kind, which, among):
    """Uneven chunks of one rank and a wide window: of one group of them flash-attn 2 would mistake a window."""
    generation(kind)
    ends = [500 * sum(CHUNKS[:i]) for i in range(len(CHUNKS) + 1)]
    layout = from_ranges([[range(a, b) for a, b in pairwise(ends)]])
    n = ends[-1]
    task = Task(lr.Dense(window=(82500, 0)), Problem(1, n, n, 16, 0), layout, layout, 16)
    found = tiles_between(task, 0, 0)
    size = torch.Size((1, n, 16, 128))
    asked = Asked(which, size, size, torch.bfloat16, torch.device("cuda:0"), True, True, False)
    operations = {"flash": (Flash(),), "torch's": installed(()), "all": installed((FlashAttn2(),))}[among]
    legs = settled_recipe(operations, found, asked)
    planned = sum(stack.pairs for leg in legs for step in leg.steps for stack in step.stacks)
    assert planned == sum(tile.pairs for tile in found)


SHORT = {"equal": [16], "in turns": [8, 24], "of any length": random.Random(0).choices(range(1, 33), k=9001)}


@pytest.mark.parametrize("packages", [(FlashAttn4(),), (FlashAttn3(),), ()], ids=["four", "three", "none"])
@pytest.mark.parametrize("lengths", SHORT)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_short_sequences_are_no_more_than_a_launch_has_room_for(hopper, which, packages, lengths):
    """A grid ends at 65,535; and a backward holds float32 sums for whole blocks of each sequence."""
    n, heads, d = 1 << 17, 8, 64
    each, bounds = SHORT[lengths], [0]
    while bounds[-1] < n:
        bounds.append(min(n, bounds[-1] + each[len(bounds) % len(each)]))
    many = len(bounds) - 1
    assert many > 1 << 12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "MOST_AT_ONCE", 1 << 11)
        recipes.forget()
        operations = packages[:1] or (Flash(),)
        size = torch.Size((1, n, heads, d))
        asked = Asked(which, size, size, torch.bfloat16, torch.device("cuda:0"), True, True, True)
        tiles = tuple(stacking.pattern_tiles(lr.Dense(documents=bounds), 1, n, heads, heads))
        legs = settled_recipe(operations, tiles, asked)
    recipes.forget()
    sequences = [sum(stack.queries.many for stack in step.stacks) for leg in legs for step in leg.steps]
    assert sum(sequences) == many
    assert max(sequences) <= 1 << 11
    assert len(sequences) < many // 50
    if which == "backward":
        assert 128 * max(sequences) * heads * d * 4 <= max(n * heads * d * 4, 1 << 28)


@pytest.mark.parametrize("operation", [cuda.Flash(), cuda.Efficient()], ids=lambda one: one.name)
def test_no_operation_takes_wider_heads_than_are_merged(monkeypatch, operation):
    monkeypatch.setattr(cuda, "capability", lambda _: (9, 0))
    q = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float16)
    assert "at most" in operation.refusal(q, max(BLOCKS) + 1)


@pytest.mark.parametrize("operation", [Flash(), FlashAttn3(), FlashAttn4()], ids=lambda one: one.name)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_short_documents_of_several_batch_rows_are_one_launch(hopper, which, operation):
    """Of which each row has its own: what is cut there would go one by one."""
    n, draw = 8192, random.Random(0)
    documents = [[0, *sorted(draw.sample(range(1, n), 99)), n] for _ in range(4)]
    size = torch.Size((4, n, 16, 128))
    asked = Asked(which, size, size, torch.bfloat16, torch.device("cuda:0"), True, True, True)
    tiles = tuple(stacking.pattern_tiles(lr.Dense(documents=documents), 4, n, 16, 16))
    (leg,) = settled_recipe((operation,), tiles, asked)
    (step,) = leg.steps
    assert sum(stack.queries.many for stack in step.stacks) == 400
