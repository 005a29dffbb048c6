"""What a GPU does with parts, interpreted on the CPU: they wait, one pass merges them, slabs are done one by one."""

from __future__ import annotations

import pytest
import torch

import longring as lr
from attending import keeps_the_budget, tensors
from choices import forget_choices
from longring.geometry import portions
from longring.kernels import fused, totals
from longring.kernels.operations.cpu import CpuFlash
from longring.schedules.select import SCHEDULES
from longring.testing import Result, judge

triton = pytest.importorskip("triton", reason="needs the package triton")
parts = pytest.importorskip("longring.kernels.triton.parts", reason="needs the package triton")
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs Triton's interpreter")

N = 24
PATTERNS = {
    "causal": lr.Dense(),
    "full": lr.Dense(causal=False),
    "window": lr.Dense(window=(5, 0)),
    "both sides": lr.Dense(causal=False, window=(3, 4)),
    "documents": lr.Dense(documents=[[0, 7, 8, N], [0, 12, 18, N]]),
    "lengths": lr.Dense(lengths=[17, N]),
    "mod": lr.Dilated([4, 8, 16], [1, 2, 4]),
    "block": lr.Dilated([4, 12], [2, 3], causal=False, phase="block"),  # leaves rows out
}


@pytest.fixture(autouse=True)
def lazy(monkeypatch):
    """Parts wait, and a slab may be as short as a tile."""
    for module in (totals, fused):
        monkeypatch.setattr(module, "is_lazy", lambda _: True)
    monkeypatch.setattr(portions, "SMALLEST_SLAB", 1)
    forget_choices()
    yield
    forget_choices()


@pytest.fixture
def poisoned():
    """Memory that nobody wrote is nan."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def few_wait(monkeypatch):
    """Less than one whole part may wait, and three of the smallest in any case."""
    for name in ("HELD", "HELD_OF_SUMS", "HELD_UNTIL_DONE"):
        monkeypatch.setattr(totals, name, 0)
    monkeypatch.setattr(totals, "ALWAYS_HELD", 1024)


@pytest.fixture
def rounding(monkeypatch):
    """Operations give their results in the dtype of what they read, as those of a GPU do."""
    for name in ("_attend", "_attend_backward"):
        attend = getattr(fused, name)

        def rounded(*args, attend=attend):
            q = next(x for x in args if isinstance(x, torch.Tensor))
            found = attend(*args)
            return tuple(x if x.ndim < 4 else x.to(q.dtype) for x in found)

        monkeypatch.setattr(fused, name, rounded)


@pytest.fixture
def passes(monkeypatch):
    """How many parts every pass of each kind took, and over which rows."""
    taken = {"merge_parts": [], "add_parts": []}
    for name, found in taken.items():
        whole_pass = getattr(parts, name)

        def counted(some, window, *rest, whole_pass=whole_pass, found=found, **more):
            found.append((len(some), window))
            whole_pass(some, window, *rest, **more)

        monkeypatch.setattr(parts, name, counted)
    return taken


@pytest.fixture
def at_home(monkeypatch):
    """An operation that writes its results where they belong, as flash-attn-4 can; how often it did, by pass."""
    done = {"forward": 0, "backward": 0}

    def forward_into(self, out, *operands):
        found, lse = self.forward(*operands)
        out.copy_(found)
        done["forward"] += 1
        return lse

    def backward_into(self, found, *operands):
        gradients = self.backward(*operands)
        done["backward"] += 1
        return tuple(x if home is None else home.copy_(x) for home, x in zip(found, gradients, strict=True))

    monkeypatch.setattr(CpuFlash, "forward_into", forward_into, raising=False)
    monkeypatch.setattr(CpuFlash, "backward_into", backward_into, raising=False)
    return done


def check(pattern, **options) -> None:
    keeps_the_budget(pattern, N, **options)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_alone(pattern):
    check(PATTERNS[pattern])


@pytest.mark.parametrize("pattern", ["both sides", "documents", "block"])
def test_alone_in_16_bits(pattern):
    check(PATTERNS[pattern], dtype=torch.bfloat16, with_dlse=False)


@pytest.mark.parametrize("pattern", ["window", "mod"])
def test_alone_with_heads_that_share_keys_and_few_parts_waiting(pattern, few_wait):
    check(PATTERNS[pattern], heads=(6, 3))


@pytest.mark.parametrize("pattern", ["causal", "mod"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_where_operations_round(schedule, pattern, rounding, poisoned):
    """What nothing is added to stays in 16 bits; gradients that travel are in 32, as whoever receives them expects."""
    options = {"node_ranks": 2} if schedule in ("double_ring", "hybrid") else {}
    layout = "contiguous" if pattern == "mod" else "zigzag"
    check(PATTERNS[pattern], dtype=torch.float16, ranks=4, layout=layout, schedule=schedule, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule, poisoned):
    ranks, of_a_node = (4, 2) if schedule in ("double_ring", "hybrid") else (3, None)
    options = {"ranks": ranks, "node_ranks": of_a_node, "schedule": schedule}
    check(PATTERNS["causal"], dtype=torch.bfloat16, heads=(6, 3), **options)


@pytest.mark.parametrize("schedule", ["exchange", "gather", "ulysses", "hybrid"])
def test_schedules_of_dilated_attention(schedule):
    """Near branches beside far ones."""
    check(PATTERNS["mod"], ranks=2 if schedule != "hybrid" else 4, node_ranks=2, schedule=schedule, layout="contiguous")


@pytest.mark.parametrize(
    ("schedule", "layout"), [("ring", "zigzag"), ("exchange", "striped"), ("gather", "zigzag"), ("ulysses", "striped")]
)
def test_schedules_with_few_parts_waiting(schedule, layout, few_wait):
    check(PATTERNS["documents"], heads=(4, 2), ranks=2, schedule=schedule, layout=layout)


# ------------------------------------------------------------------------------- results written where they belong

AT_HOME = {
    "all rows": lr.Dilated([4, 8], [1, 2]),  # of several slabs
    "one slab": lr.Dilated([4, 8, N], [1, 2, 4]),
    "a shorter segment at the end": lr.Dilated([7, 14], [1, 3]),
    "a rate of 1 twice": lr.Dilated([4, 8, 8], [1, 1, 2]),
    "documents": lr.Dilated([4, 8], [1, 2], documents=[0, 9, N]),
    "no causality": lr.Dilated([4, 12], [1, 3], causal=False, phase="block"),
}
TURNED = lr.Dense(causal=False, window=(0, None), documents=[0, N - 4, N])


@pytest.mark.parametrize("pattern", AT_HOME)
def test_what_has_most_rows_is_written_where_it_belongs(pattern, at_home, poisoned):
    check(AT_HOME[pattern], batch=1, dtype=torch.bfloat16, with_dlse=False)
    assert at_home["forward"] > 0
    assert at_home["backward"] > 0


@pytest.mark.parametrize("pattern", ["all rows", "one slab"])
def test_and_is_merged_as_any_other_where_few_may_wait(pattern, at_home, few_wait, poisoned):
    check(AT_HOME[pattern], batch=1, heads=(6, 3))
    assert at_home["forward"] > 0


def test_a_negative_scale_turns_the_gradient_of_queries_round_afterwards(at_home, poisoned):
    check(AT_HOME["all rows"], batch=1, scale=-0.3)
    assert at_home["forward"] > at_home["backward"] == 0


@pytest.mark.parametrize("pattern", ["causal", "window", "block"])
def test_where_there_is_one_stack_or_none_has_most_nothing_is(pattern, at_home):
    check(PATTERNS[pattern])
    assert at_home == {"forward": 0, "backward": 0}


def test_what_is_read_backwards_is_not(at_home, poisoned, monkeypatch):
    monkeypatch.setattr(portions, "SMALLEST_SLAB", 1 << 28)  # both documents in one: there is something to merge
    check(TURNED, batch=1)
    assert at_home == {"forward": 0, "backward": 0}


def test_batch_rows_of_their_own_stacks_are_not(at_home, poisoned):
    check(AT_HOME["all rows"], batch=2)


# ----------------------------------------------------------------------------------------------- slabs and passes


@pytest.mark.parametrize("pattern", ["documents", "mod"])
def test_rows_are_done_slab_by_slab(pattern, passes, poisoned):
    """Each row once forward, and once in each of the three gradients."""
    whole = {"documents": lr.Dense(documents=[0, 7, 8, N]), "mod": lr.Dilated([4, 8], [1, 2])}[pattern]
    check(whole)
    for name, times in (("merge_parts", 1), ("add_parts", 3)):
        windows = [window for _, window in passes[name]]
        assert len(windows) > times
        assert sorted(row for window in windows for row in window) == sorted(times * list(range(N)))
        assert all(count for count, _ in passes[name])
    assert len(passes["add_parts"]) == 3 * len(passes["merge_parts"])


def test_queries_that_are_fewer_than_keys_are_not_cut(poisoned):
    """Keys that no query stands beside belong to no stretch of them, and have a gradient of 0 all the same."""
    pattern = lr.Dilated([4, 8], [1, 2])
    q, k, v, dout, _ = tensors(1, 16, N, 2, 2, 8, torch.float32)
    out, lse = lr.attention(q, k, v, pattern=pattern, query_offset=0, return_lse=True)
    got = Result(out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout))
    verdicts = judge(got, q, k, v, pattern, dout, query_offset=0)
    assert all(verdict.ok for verdict in verdicts), verdicts


@pytest.mark.parametrize("pattern", ["window", "documents"])
def test_gradients_that_arrive_may_be_of_other_rows(pattern, poisoned):
    """What a rank sends on shrinks on its way, and so does what comes back."""
    check(PATTERNS[pattern], ranks=4, schedule="ring", layout="contiguous")


def test_nothing_is_merged_where_one_stack_is_everything(passes):
    check(PATTERNS["causal"])
    assert passes == {"merge_parts": [], "add_parts": []}


def test_what_cannot_be_cut_is_one_pass(passes):
    check(PATTERNS["window"])
    assert [window for _, window in passes["merge_parts"]] == [range(N)]
    assert [window for _, window in passes["add_parts"]] == 3 * [range(N)]


def test_more_slabs_than_are_worth_it_are_not_made(passes, monkeypatch):
    monkeypatch.setattr(portions, "MOST_SLABS", 2)
    check(lr.Dense(documents=[*range(0, N, 3), N]))
    assert [window for _, window in passes["merge_parts"]] == [range(12), range(12, N)]


def test_large_slabs_only(passes, monkeypatch):
    monkeypatch.setattr(portions, "SMALLEST_SLAB", 2 * 12 * 4 * 8)  # batch rows, rows, heads and d
    check(lr.Dense(documents=[*range(0, N, 3), N]))
    assert [window for _, window in passes["merge_parts"]] == [range(12), range(12, N)]


def test_parts_on_their_way_wait_no_longer_than_they_may(passes, few_wait):
    check(PATTERNS["mod"])
    assert max(count for found in passes.values() for count, _ in found) <= 4
    assert len(passes["merge_parts"]) > 2
