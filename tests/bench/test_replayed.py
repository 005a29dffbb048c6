"""Replay: the numbers it draws, the definition it judges by, what it finds, and the faults it must find."""

import collections
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import longring as lr
from longring.bench.replay import checks, exact, numbers, run, sampling
from longring.bench.replay.clock import Clock
from longring.bench.replay.exact import Asked, Key, Local, Rows, Terms, answers, contributions
from longring.bench.replay.gradients import Gradients
from longring.bench.replay.numbers import GOLDEN, STIR_32, STIR_64, TENSORS, Numbers
from longring.bench.replay.pairs import check_known, keys_of, queries_of
from longring.bench.replay.peers import MadeUp
from longring.bench.replay.places import Vector, position_of, positions_of, row_of
from longring.bench.replay.run import Setting, make, replay
from longring.errors import ArgumentError, LayoutError, PatternError, ScheduleRefusal, TransportError
from longring.geometry.itinerary import HOME
from longring.geometry.layouts import deal, size
from longring.geometry.patterns import Problem
from longring.numerics.definition import pair_counts
from longring.plan.event_pace import Pace
from longring.plan.hardware import hardware
from longring.schedules import relay
from longring.schedules.desk import BackwardDesk, Desk
from longring.testing import oracle
from longring.testing.budgets import SLACK
from longring.testing.oracle import magnitudes
from longring.transport.replay import FOLLOWED, Replay
from strategies import dilated_patterns, limits_only

CPU = torch.device("cpu")
CAUSAL = lr.Dense()
DILATED = lr.Dilated([16, 64, 256], [1, 4, 16])


def setting(pattern=CAUSAL, **changes):
    usual = {"tokens": 257, "ranks": 8, "rank": 5, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
    return Setting(**{**usual, "pattern": pattern, "device": CPU, "node_ranks": None, **changes})


# ------------------------------------------------------------------------------------------------- numbers

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def splitmix(x):
    x &= M64
    x = (x ^ x >> 30) * STIR_64[0] & M64
    x = (x ^ x >> 27) * STIR_64[1] & M64
    return x ^ x >> 31


def defined_number(seed, tensor, batch, position, head, dim, sender=None):
    """The generator once more, in the integers of Python."""
    salt = splitmix(splitmix(seed * GOLDEN) + GOLDEN * (8 * batch + TENSORS[tensor]))
    salt = salt if sender is None else splitmix(salt + GOLDEN * (sender + 1))
    key = splitmix((position << 20 ^ head) * GOLDEN + salt)
    word = ((key & M32) + dim * (key >> 32 | 1)) & M32
    word = (word ^ word >> 16) * STIR_32[0] & M32
    word = (word ^ word >> 15) * STIR_32[1] & M32
    signed = word - (1 << 32) if word >> 31 else word
    return torch.tensor(signed, dtype=torch.int32).float() * (3**0.5 / 2**31)


@pytest.mark.parametrize("position", [0, 1, 2**30 + 7, 2**43 - 1])
def test_numbers_are_their_definition(position):
    draw = Numbers(7, 5, CPU)
    for tensor in TENSORS:
        for batch, head, sender in ((0, 0, None), (3, 11, None), (0, 0, 0), (3, 11, 1023)):
            got = draw.at(tensor, batch, torch.tensor([position]), head, torch.float32, sender=sender)[0]
            want = torch.stack([defined_number(7, tensor, batch, position, head, dim, sender) for dim in range(5)])
            assert torch.equal(got, want)


@pytest.mark.parametrize("at_once", [1, 40, 1 << 16])
def test_rows_are_the_same_however_they_are_asked_for(at_once, monkeypatch):
    monkeypatch.setitem(numbers.AT_ONCE, "cpu", at_once)
    draw = Numbers(1, 8, CPU)
    for dtype in (torch.float32, torch.bfloat16):
        for positions, heads in ((range(3, 40, 4), range(1, 8, 3)), (range(5), range(2)), (range(9, 10), range(4, 5))):
            some = torch.empty(len(positions), len(heads), 8, dtype=dtype)
            draw.fill(some, "k", 1, positions, heads)
            for number, head in enumerate(heads):
                assert torch.equal(some[:, number], draw.at("k", 1, torch.tensor(positions), head, dtype))


def test_every_word_of_the_question_matters():
    def drawn(seed=0, tensor="q", batch=0, position=10, head=1, sender=None):
        at = torch.tensor([position])
        return Numbers(seed, 64, CPU).at(tensor, batch, at, head, torch.float32, sender=sender)[0]

    base = drawn()
    others = [drawn(seed=1), drawn(tensor="k"), drawn(batch=1), drawn(position=11), drawn(position=10 + 2**32)]
    for other in [*others, drawn(head=2), drawn(sender=0), drawn(sender=1), base.roll(1)]:
        assert abs(float((base * other).mean())) < 0.5  # of unrelated ones 0.125 is usual
        assert not (base == other).any()


def test_numbers_look_drawn_at_random():
    x = torch.empty(20_000, 2, 32)
    Numbers(3, 32, CPU).fill(x, "v", 0, range(20_000), range(2))
    n = x.numel()
    assert abs(float(x.mean())) < 5 / n**0.5
    assert abs(float(x.var()) - 1) < 5 / n**0.5
    assert float(x.abs().max()) <= 3**0.5 * (1 + 1e-6)
    steps = torch.histc(x, 64, -(3**0.5), 3**0.5) * (64 / n)
    assert float((steps - 1).abs().max()) < 6 * (64 / n) ** 0.5
    for a, b in ((x[:-1], x[1:]), (x[:, :1], x[:, 1:]), (x[..., :-1], x[..., 1:]), (x[:-1, ..., :-1], x[1:, ..., 1:])):
        assert abs(float((a * b).mean())) < 5 / (n / 2) ** 0.5
    rows = x[:2000, 0].double()
    among = rows @ rows.T / 32**0.5  # scores of unrelated rows are nearly normal
    off = among[~torch.eye(2000, dtype=torch.bool)]
    assert abs(float(off.std()) - 1) < 0.02
    assert float(off.abs().max()) < 6.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_bits():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = []
        for device in (CPU, torch.device("cuda")):
            x = torch.empty(999, 3, 128, dtype=dtype, device=device)
            Numbers(5, 128, device).fill(x, "q", 2, range(2**30, 2**30 + 3 * 999, 3), range(1, 10, 3))
            found.append(x.cpu())
        assert torch.equal(*found)


def test_a_seed_beyond_63_bits_is_refused():
    with pytest.raises(ArgumentError, match="seed must be"):
        Numbers(2**63, 4, CPU)


# ------------------------------------------------------------------------------------------- who meets whom


@given(data=st.data(), n=st.integers(1, 40), kv_heads=st.integers(1, 5))
def test_pairs_are_the_definitions(data, n, kv_heads):
    problem = Problem(1, n, n, kv_heads, 0)
    pattern = data.draw(limits_only(problem) | dilated_patterns(problem).filter(lambda p: p.documents is None))
    counts = pair_counts(pattern, problem)[0]
    for head in range(kv_heads):
        for at in range(n):
            keys = collections.Counter(j for r in keys_of(pattern, n, at, head, kv_heads) for j in r)
            queries = collections.Counter(i for r in queries_of(pattern, n, at, head, kv_heads) for i in r)
            assert keys == {j: int(c) for j, c in enumerate(counts[head, at]) if c}
            assert queries == {i: int(c) for i, c in enumerate(counts[head, :, at]) if c}


@pytest.mark.parametrize(
    "pattern", [lr.Dense(documents=[0, 3, 9]), lr.Dense(lengths=[4]), lr.Dilated([4], [1], documents=[0, 9])]
)
def test_patterns_that_a_row_cannot_be_followed_through_are_refused(pattern):
    with pytest.raises(PatternError, match="replay knows"):
        check_known(pattern)


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_rows_and_positions(name):
    for shard in deal(name, 61, 7).shards:
        held = [position for piece in shard for position in piece]
        for rows in (range(len(held)), range(1, len(held), 3), range(2, 3)):
            assert [p for r in positions_of(shard, rows) for p in r] == [held[row] for row in rows]
        assert [row_of(shard, position) for position in held] == list(range(len(held)))
        assert [position_of(shard, row) for row in range(len(held))] == held
        assert Local(shard)(torch.tensor(held)).tolist() == list(range(len(held)))


# ------------------------------------------------------------------------------------------- the definition


def whole(draw, n, heads, kv_heads, dtype=torch.float64):
    found = []
    for tensor, many in (("q", heads), ("k", kv_heads), ("v", kv_heads), ("dout", heads)):
        x = torch.empty(1, n, many, draw.d, dtype=dtype)
        draw.fill(x[0], tensor, 0, range(n), range(many))
        found.append(x)
    return found


@pytest.mark.parametrize("at_once", [200, 1 << 21])
@pytest.mark.parametrize("pattern", [CAUSAL, lr.Dense(causal=False), lr.Dense(window=(7, 0)), DILATED], ids=repr)
def test_answers_are_the_definitions(pattern, at_once, monkeypatch):
    """The value, and the sums of positive terms that the budget is made of, for every query and every key."""
    monkeypatch.setitem(exact.AT_ONCE, "cpu", at_once)
    n, heads, kv_heads = 67, 4, 2
    draw = Numbers(2, 8, CPU)
    q, k, v, dout = whole(draw, n, heads, kv_heads)
    want, large = (f(q, k, v, pattern, dout) for f in (oracle, magnitudes))
    terms = Terms(draw, torch.float64, heads // kv_heads, 8**-0.5)
    task = make(setting(pattern, tokens=n, ranks=1, rank=0, head_dim=8)).task
    vectors = [Vector(0, i, g) for i in range(n) for g in range(kv_heads)]
    judge = checks.Judge(task, 0, terms, Gradients(task, 0, draw))
    for asked in judge._asked(vectors):
        found = answers(terms, asked, with_dq=True)
        for name in ("out", "lse", "dq"):
            for got, all_of_it in ((found[name].value, want), (found[name].large, large)):
                there = checks.Results(*all_of_it)
                expected = judge._found_for(there, name, asked)
                torch.testing.assert_close(
                    got.double(), expected, atol=2e-5 if got is found[name].large else 1e-12, rtol=1e-5
                )
    rows, local = Rows(want.out, want.lse), Local((range(n),))
    for j in (0, 1, 30, 66):
        for g in range(kv_heads):
            key = Key(0, j, g, queries_of(pattern, n, j, g, kv_heads))
            found = contributions(terms, key, rows, local)
            for name in ("dk", "dv"):
                torch.testing.assert_close(found[name].value[0], getattr(want, name)[0, j, g], atol=1e-12, rtol=0)
                torch.testing.assert_close(
                    found[name].large[0].double(), getattr(large, name)[0, j, g], atol=2e-5, rtol=1e-5
                )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_rough_answers_are_as_far_off_as_the_definition_in_that_precision(dtype):
    """Of rows that see hundreds of keys: within a factor of two, either way, of what `longring.testing` takes."""
    n, heads = 300, 2
    draw = Numbers(4, 16, CPU)
    q, k, v, dout = whole(draw, n, heads, heads, dtype)
    want, rough = oracle(q, k, v, CAUSAL, dout), oracle(q, k, v, CAUSAL, dout, dtype=dtype)
    terms = Terms(draw, dtype, 1, 16**-0.5)
    found = answers(terms, Asked(0, range(heads), tuple(range(200, n)), (range(n),), CAUSAL.limits), with_dq=True)
    for name in ("out", "dq"):
        theirs = float((getattr(rough, name) - getattr(want, name))[0, 200:].norm())
        ours = float((found[name].rough - found[name].value).norm())
        assert 0.5 < ours / theirs < 2


def test_the_slack_is_that_of_all_other_tests():
    assert SLACK == checks.SLACK


def test_rows_that_see_nothing_are_zero_and_minus_infinity():
    pattern = lr.Dilated([8], [4], causal=False)
    terms = Terms(Numbers(0, 4, CPU), torch.float32, 1, 0.5)
    found = answers(terms, Asked(0, range(1), (1,), keys_of(pattern, 16, 1, 0, 1)), with_dq=True)
    assert not found["out"].value.any()
    assert found["lse"].value.item() == -math.inf

    def errors(got, name):
        nothing = checks.Result(torch.zeros_like(found[name].value))
        return checks.row_errors(got, found[name], torch.float32, nothing, is_lse=name == "lse")

    assert all(float(x) == 0 for x in errors(torch.tensor([[-math.inf]]), "lse"))
    assert float(errors(torch.zeros(1, 1), "lse").found) == math.inf
    assert float(errors(torch.full((1, 4), math.nan), "out").found) == math.inf


# ---------------------------------------------------------------------------------------- what a rank finds

CASES = [
    (CAUSAL, "ring", "zigzag"),
    (CAUSAL, "bidirectional", "zigzag"),
    (CAUSAL, "double_ring", "striped"),
    (CAUSAL, "gather", "zigzag"),
    (lr.Dense(causal=False), "ring", "contiguous"),
    (lr.Dense(window=(30, 0)), "exchange", "contiguous"),
    (DILATED, "exchange", "contiguous"),
    (DILATED, "ring", "contiguous"),
]


QUANTITIES = ["out", "lse", "dq"] + [
    f"{kind}, {whose}" for whose in ("own rows", "with what came home", "rows of others") for kind in ("dk", "dv")
]


def by_engine(one, monkeypatch):
    """(everything that one rank finds with all gradients that it sends, who judges it)."""
    kept = []

    def every_number(task, rank, leaving, samples, seed):
        return list(range(sum(parcel.vectors for parcel in leaving)))

    monkeypatch.setattr(run, "sampled_sent", every_number)
    monkeypatch.setattr(checks.Judge, "both", lambda self, found, *rest: kept.append((found, self)) or [])
    replay(one)
    return kept[0]


@pytest.mark.parametrize(("pattern", "schedule", "layout"), CASES)
def test_ranks_replayed_one_by_one_are_the_ring(pattern, schedule, layout, monkeypatch):
    """out, lse and dq are those of `simulate`, bit by bit; what all ranks added to what came adds up to dk and dv."""
    ranks = 4
    one = setting(pattern, tokens=131, ranks=ranks, node_ranks=2, schedule=schedule, layout=layout, batch=2, seed=9)
    draw = Numbers(9, 16, CPU)
    parts = [whole(draw, 131, 4, 2, torch.float32)]
    second = []
    for tensor, many in (("q", 4), ("k", 2), ("v", 2), ("dout", 4)):
        x = torch.empty(1, 131, many, 16)
        draw.fill(x[0], tensor, 1, range(131), range(many))
        second.append(x)
    parts.append(second)
    q, k, v, dout = (torch.cat(pair) for pair in zip(*parts, strict=True))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    sim = lr.simulate(q, k, v, ranks=ranks, pattern=pattern, layout=layout, schedule=schedule, node_ranks=2)
    sim.out.backward(dout)
    dk, dv = (torch.zeros(k.shape, dtype=torch.float64) for _ in "kv")
    shards = deal(layout, 131, ranks).shards
    for rank in range(ranks):
        found, judge = by_engine(Setting(**{**vars(one), "rank": rank}), monkeypatch)
        held = [position for piece in shards[rank] for position in piece]
        assert torch.equal(found.out, sim.out.detach()[:, held])
        assert torch.equal(found.lse, sim.lse.detach()[:, :, held])
        assert torch.equal(found.dq, q.grad[:, held])
        own = [Vector(b, p, h) for b in range(2) for p in held for h in range(2)]
        mine = zip(own, found.dk.view(-1, 16), found.dv.view(-1, 16), strict=True)
        everything = [*mine, *found.sent]
        brought = judge.gradients.brought(judge.arriving, [key for key, _, _ in everything])
        for number, ((batch, position, head), some_dk, some_dv) in enumerate(everything):
            dk[batch, position, head] += some_dk - brought["dk"][number]
            dv[batch, position, head] += some_dv - brought["dv"][number]
    torch.testing.assert_close(dk, k.grad.double(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(dv, v.grad.double(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("pattern", "schedule", "layout"), CASES)
def test_every_check_holds(pattern, schedule, layout, dtype):
    found = replay(setting(pattern, node_ranks=4, schedule=schedule, layout=layout, dtype=dtype), samples=12)
    assert found.ok, [check for check in found.checks if not check.ok]
    quantities = [check.quantity for check in found.checks]
    assert quantities[:9] == QUANTITIES
    assert set(quantities[9:]) <= {"dk, only passed on", "dv, only passed on"}
    assert all(len(check.rows) >= 12 for check in found.checks[:5])
    assert all(len(check.rows) >= 2 for check in found.checks[5:])
    if dtype == torch.bfloat16:
        assert all(check.allowed < 0.01 for check in found.checks)
    for phase in found.phases.values():
        assert phase.bytes_agree
        assert phase.bytes_sent > 0
        assert 0.5 < phase.peak_bytes / phase.predicted_bytes < 1.5
        assert phase.flops > 0
        assert phase.predicted_seconds > 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler of flash-attn-4, to its authors
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("pattern", "schedule", "layout"), CASES)
def test_every_check_holds_on_a_gpu(pattern, schedule, layout):
    size_ = {"tokens": 4097, "head_dim": 64, "dtype": torch.bfloat16, "device": torch.device("cuda", 0)}
    found = replay(setting(pattern, node_ranks=4, schedule=schedule, layout=layout, **size_), samples=32)
    assert found.ok, [check for check in found.checks if not check.ok]
    for phase in found.phases.values():
        assert phase.bytes_agree
        assert phase.peak_bytes > 0
        assert phase.seconds > 0


@pytest.mark.parametrize("affordable", [0, 1 << 40])
def test_dk_and_dv_say_whose_lse_they_were_checked_with(affordable, monkeypatch):
    monkeypatch.setattr(checks, "AFFORDABLE", affordable)
    found = replay(setting(DILATED), samples=8)
    assert found.ok
    notes = {check.note for check in found.checks if check.note}
    assert notes == {
        "with lse and out of the rank's queries in float64"
        if affordable
        else "with the forward's own lse and out for the rank's queries"
    }


def test_rows_of_every_branch_are_sampled():
    """A random row is in the branch of rate 16 once in 16 times, and visitors' keys are seen there alone."""
    made = make(setting(DILATED, tokens=4096, ranks=64, rank=40))
    shard = made.task.queries.shards[40]
    vectors = sampling.sampled_rows(made.task, shard, 40, 0)
    assert {shard[0][0], shard[-1][-1]} <= {vector.position for vector in vectors}
    far = [v for v in vectors if any(r.step == 16 for r in keys_of(DILATED, 4096, v.position, v.kv_head, 2))]
    assert len(far) >= 4
    assert len({vector.position for vector in vectors}) >= 40


def test_sampled_rows_are_as_many_as_asked_for():
    made = make(setting(tokens=4096, ranks=4, rank=1))
    shard = made.task.queries.shards[1]
    vectors = sampling.sampled_rows(made.task, shard, 64, 0)
    rows = {vector.position for vector in vectors}
    assert 64 <= len(rows) <= 68
    assert {end for piece in shard for end in (piece[0], piece[-1])} <= rows
    assert len(vectors) == 2 * len(rows)
    assert sampling.sampled_rows(made.task, shard, 10**9, 0)[-1].position == shard[-1][-1]
    assert sampling.sampled_numbers(1000, 8, 0)[0] == 0
    assert sampling.sampled_numbers(0, 8, 0) == []
    assert sampling.sampled_numbers(3, 8, 0) == [0, 1, 2]


def test_the_forward_alone():
    found = replay(setting(), forward_only=True, samples=5, repeats=3)
    assert found.ok
    assert list(found.phases) == ["forward"]
    assert len(found.phases["forward"].runs) == 3
    assert (
        found.phases["forward"].seconds
        == sorted(found.phases["forward"].runs[1:])[0] / 2 + sorted(found.phases["forward"].runs[1:])[1] / 2
    )
    assert [check.quantity for check in found.checks] == ["out", "lse"]
    assert "gradients" not in found.simulated


def test_a_time_is_predicted_where_rates_are_known():
    """Those of the CPU are of one core; a GTX 1080 has none for 16 bits, which is no reason to refuse them."""
    made = make(setting())
    on_cpu, on_gpu, on_old_gpu = (
        Pace(hardware(name), made.task, "forward", 16, 2) for name in ("cpu", "h200", "gtx1080")
    )
    assert run._computing(on_cpu, made, 5, threads=4) == run._computing(on_cpu, made, 5, threads=1) / 4 > 0
    assert run._computing(on_gpu, made, 5, threads=4) == run._computing(on_gpu, made, 5, threads=1) > 0
    assert run._computing(on_old_gpu, made, 5, threads=4) is None


def test_a_rank_may_hold_nothing_and_one_may_be_alone():
    empty = replay(setting(tokens=3, ranks=8, rank=7, layout="contiguous"), samples=4)
    assert (empty.ok, empty.local_tokens, empty.checks) == (True, 0, [])
    assert empty.notes == ["this rank holds no token: there is nothing to check"]
    alone = replay(setting(tokens=50, ranks=1, rank=0), samples=4)
    assert alone.ok
    assert alone.phases["forward"].bytes_received == 0
    assert alone.simulated == "Nothing: there is no other rank."


def test_auto_takes_what_can_be_replayed():
    """Here the engine would change places by heads, which nobody can make up."""
    one = setting(lr.Dense(causal=False), tokens=2048, ranks=2, rank=1, heads=32, kv_heads=32, head_dim=4)
    task = make(one).task
    taken = run._schedule(one, task, torch.empty(1, 0, 32, 4))
    assert taken.name in FOLLOWED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "pick_schedule", lambda *_: lr.call.Choice("ulysses", "so it was estimated"))
        taken = run._schedule(one, task, torch.empty(1, 0, 32, 4))
    assert taken.name in FOLLOWED
    assert "auto would take ulysses" in taken.reason


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"rank": 8}, ArgumentError, "rank must be from 0 to 7"),
        ({"tokens": 10**14, "ranks": 4, "rank": 0}, ArgumentError, "at most"),
        ({"schedule": "ulysses"}, ScheduleRefusal, "'ulysses' cannot be replayed"),
        ({"schedule": "hybrid"}, ScheduleRefusal, "ring, bidirectional, double_ring, exchange, gather can"),
        ({"schedule": "no such"}, ScheduleRefusal, "schedule must be one of auto"),
        ({"layout": "dealt"}, LayoutError, "documents"),
        ({"node_ranks": 3}, ArgumentError, "divide the 8 ranks"),
        ({"pattern": lr.Dense(documents=[0, 257])}, PatternError, "replay knows"),
    ],
)
def test_what_cannot_be_replayed_is_refused(changes, error, said):
    with pytest.raises(error, match=said):
        replay(setting(**changes))


def a_billion(**changes):
    """1 Gi tokens over 1,024 ranks, segments up to the whole sequence: a rank with a Mi of them."""
    branches = [(2048 * 4**k, 4**k) for k in range(11)]
    pattern = lr.Dilated([w for w, _ in branches], [r for _, r in branches])
    assert branches[-1][0] >= 2**30
    usual = {"tokens": 2**30, "ranks": 1024, "rank": 513, "heads": 1, "kv_heads": 1, "head_dim": 2}
    return setting(pattern, **{**usual, "dtype": torch.bfloat16, **changes})


@pytest.mark.parametrize("tokens", [2**30, 10**9])
def test_a_billion_dilated_tokens_are_planned(tokens):
    """Shards of 10 ** 9 begin anywhere within segments."""
    made = make(a_billion(tokens=tokens))
    phase = run.Phase("backward")
    run._count(made, phase)
    assert all(map(len, run._gradients(made)))
    assert made.schedule.name == "exchange"
    assert 0 < phase.planned_received < 2**20
    run._predict(made, a_billion(tokens=tokens), [phase])
    assert 16 * 2**20 < phase.predicted_bytes < 128 * 2**20


@pytest.mark.slow
def test_a_billion_dilated_tokens_are_run():
    found = replay(a_billion(), samples=16)
    assert found.ok
    assert found.local_tokens == 2**20
    for phase in found.phases.values():
        assert phase.bytes_received < 2**20
        assert 0.95 < phase.peak_bytes / phase.predicted_bytes < 1.05


# ------------------------------------------------------------------------------------------ faults it must find


def wrong(pattern=CAUSAL, samples=24, **changes):
    found = replay(setting(pattern, tokens=1024, ranks=32, rank=20, dtype=torch.bfloat16, **changes), samples=samples)
    return {check.quantity for check in found.checks if not check.ok}


@pytest.mark.parametrize("lane", ["own", "visitors'"])
@pytest.mark.parametrize("schedule", ["ring", "bidirectional"])
def test_other_keys_than_its_own_or_its_visitors_are_not_sent_unseen(lane, schedule, monkeypatch):
    honest = relay.Travel._packed

    def forgetful(travel, at, parcel):
        packed = honest(travel, at, parcel)
        return [torch.zeros_like(x) for x in packed] if (at == HOME) == (lane == "own") else packed

    monkeypatch.setattr(relay.Travel, "_packed", forgetful)
    with pytest.raises(TransportError, match="rank 20 sent another k to rank"):
        wrong(schedule=schedule)


def test_nothing_is_wrong_where_no_fault_was_planted():
    assert wrong() == wrong(DILATED) == set()


@pytest.mark.parametrize("pattern", [CAUSAL, DILATED], ids=["causal", "dilated"])
def test_a_tile_that_is_dropped_is_found(pattern, monkeypatch):
    """One visit of a ring of 32."""
    look, looks = Desk.look, []

    def forgetful(self, tiles, k, v, what):
        looks.append(tiles)
        visits = sum(bool(some) for some in looks)
        look(self, () if visits == 3 and tiles else tiles, k, v, what)

    monkeypatch.setattr(Desk, "look", forgetful)
    assert {"out", "lse"} <= wrong(pattern, schedule="ring")


@pytest.mark.parametrize("pattern", [CAUSAL, DILATED], ids=["causal", "dilated"])
def test_a_tile_that_is_dropped_in_the_backward_is_found(pattern, monkeypatch):
    look, looks = BackwardDesk.look, []

    def forgetful(self, tiles, *rest):
        looks.append(tiles)
        visits = sum(bool(some) for some in looks)
        look(self, () if visits == 3 and tiles else tiles, *rest)

    monkeypatch.setattr(BackwardDesk, "look", forgetful)
    assert "dq" in wrong(pattern, schedule="ring", samples=200)


@pytest.mark.parametrize("off", ["k", "v"])
def test_rows_of_one_visitor_that_are_one_off_are_found(off, monkeypatch):
    """Its keys against its values. (Both alike would be the same rows in another order, which is no fault.)"""
    draw = MadeUp._draw

    def shifted(self, parcel, tensor, flat):
        draw(self, parcel, tensor, flat)
        if parcel.owner == 7 and tensor == off:
            flat.copy_(flat.view(-1, 2 * 16).roll(1, 0).view(-1))

    monkeypatch.setattr(MadeUp, "_draw", shifted)
    assert "out" in wrong(schedule="exchange")
    with pytest.raises(TransportError, match=f"sent another {off} "):
        wrong(schedule="ring")  # in which they go on


def test_gradients_that_belong_to_the_next_row_are_found(monkeypatch):
    keep = MadeUp._keep_some

    def shifted(self, parcel, *gradients):
        keep(self, parcel, *(x.roll(2, 0) for x in gradients))  # 2 kv heads

    monkeypatch.setattr(MadeUp, "_keep_some", shifted)
    assert wrong(schedule="ring") == {"dk, rows of others", "dv, rows of others"}


def test_one_own_row_that_is_wrong_is_found(monkeypatch):
    """By the worst row, where the others hide it in the mean."""
    attended = run.attended

    def careless(*args):
        out, lse = attended(*args)
        out[0, 0, 0] *= 1.1
        return out, lse

    monkeypatch.setattr(run, "attended", careless)
    assert wrong() == {"out"}


def test_a_gradient_that_is_sent_late_or_twice_is_found(monkeypatch):
    take = MadeUp.take

    def doubled(self, parcel, tensors):
        take(self, parcel, tuple(2 * x for x in tensors) if parcel.kind == "gradients" else tensors)

    monkeypatch.setattr(MadeUp, "take", doubled)
    assert wrong() == {"dk, rows of others", "dv, rows of others"}


def test_an_lse_that_is_slightly_off_is_found(monkeypatch):
    """By one key of about six hundred."""
    attended = run.attended
    monkeypatch.setattr(run, "attended", lambda *args: (lambda out, lse: (out, lse + 1 / 600))(*attended(*args)))
    assert "lse" in wrong()


def test_the_time_to_make_others_up_is_told_apart(monkeypatch):
    clock = Clock(CPU)
    ticks = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    with clock.running():  # from 0 to 5
        with clock.aside():  # from 1 to 2
            pass
        with clock.aside():  # from 3 to 4
            pass
    assert clock.seconds() == (3.0, 2.0)


def test_everything_told_is_in_the_json():
    found = replay(setting(DILATED), samples=6)
    told = found.to_json()
    assert told["ok"] is True
    assert (told["rank"], told["ranks"], told["tokens"], told["local_tokens"]) == (5, 8, 257, 32)
    assert set(told["phases"]) == {"forward", "backward"}
    for phase in told["phases"].values():
        assert {"seconds", "flops", "tflops", "peak_bytes", "predicted_bytes", "predicted_seconds"} < set(phase)
        assert {"bytes_received", "bytes_sent"} < set(phase)
    for check in told["checks"]:
        assert {"quantity", "rows", "error", "allowed", "ok"} < set(check)
    assert size(make(setting(DILATED)).task.queries.shards[5]) == 32
    assert isinstance(make(setting()).door, Replay)
