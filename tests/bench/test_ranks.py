"""Contenders on ranks: judged by float64, then timed in turns, and the wrong ones told. No test looks at a time."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longring import Dense, Dilated, LongringError
from longring.bench.gpu.given import Place, Shape, given
from longring.bench.ranks import contest, program, run, seats, truth
from longring.bench.ranks.case import Case, Contender
from longring.bench.ranks.contest import Judge, play
from longring.bench.ranks.scenarios import CAUSAL, OF_PRESET, PRESETS, QUICK, SCENARIOS, Wish, cases
from longring.bench.ranks.seats import ALONE, DATA_PARALLEL, DEEPSPEED, ONE_PROCESS, Seat
from longring.bench.ranks.tables import memory_cells, notes, time_cells
from longring.bench.records import Row, Spread, new_record
from longring.errors import ArgumentError
from longring.testing import oracle

SMALL = Shape(61, 4, 2, 8)
CPU = torch.device("cpu")
PATTERNS = {
    "causal": CAUSAL,
    "full": Dense(causal=False),
    "window": Dense(window=(9, 0)),
    "dilated": Dilated([8, 32], [1, 2]),
}


def a_case(*contenders, ranks=2, shape=SMALL, **told):
    return Case("schedules", shape, ranks, **{"pattern": CAUSAL, "contenders": contenders, "rounds": 2, **told})


# --------------------------------------------------------------------------------------------------------- judged


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_the_definition_in_the_same_precision_is_right(pattern, dtype):
    x = given(SMALL, Place(CPU, dtype))
    known = truth.truth_of(x, pattern)
    near = oracle(x.q, x.k, x.v, pattern, x.dout, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    found = truth.pieces(known, torch.arange(61), *(near[i].to(dtype) for i in (0, 2, 3, 4)))
    errors = truth.errors_in(known, [found])
    assert all(error <= known.allowed[name] for name, error in errors.items()), (errors, known.allowed)


def of_two_ranks(known, want, **changed):
    """An answer dealt to two ranks that hold the even and the odd rows."""
    parts = {name: getattr(want, name) for name in ("out", "dq", "dk", "dv")} | changed
    at = [torch.arange(0, 61, 2), torch.arange(1, 61, 2)]
    return [truth.pieces(known, here, *(parts[name][:, here] for name in ("out", "dq", "dk", "dv"))) for here in at]


@pytest.fixture(scope="module")
def known_and_want():
    x = given(SMALL, Place(CPU, torch.float32))
    return truth.truth_of(x, CAUSAL), oracle(x.q, x.k, x.v, CAUSAL, x.dout)


def test_an_answer_dealt_to_ranks_is_put_together(known_and_want):
    known, want = known_and_want
    errors = truth.errors_in(known, of_two_ranks(known, want))
    assert all(error < 1e-6 for error in errors.values())


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_what_is_wrong_on_one_rank_is_wrong(known_and_want, name):
    known, want = known_and_want
    off = getattr(want, name).clone()
    off[:, 1::2] *= 1.001
    errors = truth.errors_in(known, of_two_ranks(known, want, **{name: off}))
    assert [other for other, error in errors.items() if error > known.allowed[other]] == [name]


def test_rows_that_nobody_has_are_infinitely_wrong(known_and_want):
    known, want = known_and_want
    even, _ = of_two_ranks(known, want)
    assert set(truth.errors_in(known, [even]).values()) == {math.inf}


def test_nan_is_infinitely_wrong(known_and_want):
    known, want = known_and_want
    off = want.out.clone()
    off[:, -1] = torch.nan
    assert truth.errors_in(known, of_two_ranks(known, want, out=off))["out"] == math.inf


def test_the_judge_does_not_trust_an_lse_of_ours_that_is_wrong(monkeypatch):
    honest = truth.attention

    def off(*given, **options):
        out, lse = honest(*given, **options)
        return out, lse + 0.01

    monkeypatch.setattr(truth, "attention", off)
    with pytest.raises(LongringError, match="is wrong itself"):
        truth.truth_of(given(SMALL, Place(CPU, torch.float32)), CAUSAL)


# ------------------------------------------------------------------------------------------------------- on ranks


def forgetful(contender, case):
    """In the place of somebody's ring: every rank attends to its own tokens alone."""
    seat = seats._ours(Contender("", "ours", "ring", "zigzag"), case)
    return replace(seat, attend=lambda q, k, v: seats.attention(q, k, v, pattern=case.pattern))


def absent(contender, case):
    raise ModuleNotFoundError("No module named 'theirs'")


def broken_on_one_rank(contender, case):
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("no more\nmemory")
    return forgetful(contender, case)


def compete_with_odd_ones(case, truths):
    """What each process runs, with contenders that are not as they should be."""
    odd = {"forgetful": forgetful, "our forgetful": forgetful, "absent": absent, "broken": broken_on_one_rank}
    seats.SEATS.update(odd)
    return program.compete(case, truths)


@pytest.fixture(scope="module")
def played():
    ours = [Contender(f"longring {name}", "ours", name, "zigzag") for name in ("ring", "ulysses", "gather")]
    odd = [Contender(name, "package") for name in ("forgetful", "absent", "broken")]
    others = [Contender(DATA_PARALLEL, "kernel"), Contender("our forgetful")]
    case = a_case(Contender(ONE_PROCESS, "kernel"), *ours, *odd, *others, baseline=ONE_PROCESS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contest, "compete", compete_with_odd_ones)
        yield play(case, Judge(), timeout=100)


def rows_of(played, name):
    return [row for row in played.rows if row.name == name]


@pytest.mark.processes
def test_every_contender_has_a_row_for_each_pass(played):
    for name in (ONE_PROCESS, "longring ring", "longring ulysses", "longring gather", DATA_PARALLEL):
        rows = rows_of(played, name)
        assert [row.phase for row in rows] == ["forward", "backward"]
        for row in rows:
            assert row.time.runs == 2
            assert not row.is_wrong
            assert set(row.errors) == set(row.allowed) == ({"out"} if row.phase == "forward" else {"dq", "dk", "dv"})
            assert (row.tokens, row.ranks, row.heads, row.kv_heads) == (61, 2, 4, 2)


@pytest.mark.processes
def test_a_peer_that_is_wrong_is_told_and_timed_as_such(played):
    rows = rows_of(played, "forgetful")
    assert len(rows) == 2
    for row in rows:
        assert row.is_wrong
        assert row.time is not None
        assert row.note.startswith("WRONG in ")
        assert max(row.errors.values()) > 0.01


@pytest.mark.processes
def test_what_is_ours_and_wrong_is_not_timed_and_a_failure(played):
    rows = rows_of(played, "our forgetful")
    assert all(row.is_wrong and row.time is None for row in rows)
    assert [row.note.endswith("allowed); not timed") for row in rows] == [True, True]
    assert len(played.failures) == 2
    assert all("our forgetful" in failure and "WRONG in" in failure for failure in played.failures)


@pytest.mark.processes
def test_who_is_not_installed_is_missing_and_who_breaks_on_one_rank_says_so(played):
    assert played.missing == ["absent: ModuleNotFoundError: No module named 'theirs'"]
    assert rows_of(played, "absent") == []
    (row,) = rows_of(played, "broken")
    assert (row.phase, row.time, row.note) == ("both", None, "not timed: RuntimeError: no more memory")


@pytest.mark.processes
def test_memory_is_that_of_each_rank_and_the_plans_beside_it(played):
    (_, ring), (_, alone) = rows_of(played, "longring ring"), rows_of(played, ONE_PROCESS)
    assert len(ring.peak_bytes) == 2
    assert min(ring.peak_bytes) > 0
    assert alone.peak_bytes[1] == 0  # it waits
    assert sum(ring.components.values()) == max(ring.peak_bytes)
    assert sum(ring.predicted_components.values()) == ring.predicted_bytes
    assert ring.predicted_bytes == pytest.approx(max(ring.peak_bytes), rel=0.15)  # so small, fixed costs matter
    assert alone.predicted_bytes is None
    assert ring.components["q"] == 31 * 4 * 8 * 4


@pytest.mark.processes
def test_ratios_are_of_the_same_work(played):
    base = rows_of(played, ONE_PROCESS)[0]
    for name, sequences in (("longring ring", 1), (DATA_PARALLEL, 2)):
        row = rows_of(played, name)[0]
        ratio = row.ratios[f"times {ONE_PROCESS}, for the same work"]
        assert ratio == pytest.approx(row.time.median / sequences / base.time.median)
    assert not any("fastest of ours" in what for what in rows_of(played, "longring ring")[0].ratios)
    assert any("fastest of ours" in what for what in rows_of(played, DATA_PARALLEL)[0].ratios)


@pytest.mark.processes
def test_tables_have_a_line_for_each(played):
    lines = {line[0]: line for line in time_cells(played.rows)}
    assert lines["longring ring"][-1].endswith("%")
    assert lines["forgetful"][-1].endswith(" x")
    assert "longring ring" in lines
    assert lines["longring ring"][4].endswith("KiB")
    assert all(line[0] != "broken" for line in memory_cells(played.rows))
    assert "broken: not timed: RuntimeError: no more memory" in notes(played.rows)
    assert f"{DATA_PARALLEL}: 2 sequences at a time, a whole one on each rank" in notes(played.rows)


@pytest.mark.processes
def test_deepspeed_is_refused_by_name_where_ranks_do_not_divide_the_tokens():
    case = a_case(Contender(DEEPSPEED, "package"), shape=Shape(65, 4, 4, 8), ranks=2, baseline=DEEPSPEED)
    with pytest.raises(NotImplementedError, match="2 ranks do not divide 65 tokens"):
        seats.SEATS[DEEPSPEED](case.contenders[0], case)


def test_deepspeed_is_a_peer_where_it_is_installed():
    pytest.importorskip("deepspeed.sequence.layer")
    case = a_case(Contender(DEEPSPEED, "package"), shape=Shape(64, 4, 4, 8), baseline=DEEPSPEED)
    found = play(case, Judge(), timeout=100)
    assert [(row.phase, row.is_wrong) for row in found.rows] == [("forward", False), ("backward", False)]


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_ranks_may_hold_nothing_and_dtypes_differ(dtype):
    ring = Contender("longring ring", "ours", "ring", "zigzag")
    case = a_case(Contender(ALONE), ring, ranks=3, shape=Shape(2, 2, 1, 8), dtype=dtype, baseline=ALONE)
    found = play(case, Judge(), timeout=100)
    assert found.failures == []
    assert len(found.rows) == 4


# ------------------------------------------------------------------------------------------------------ in turns


def test_contenders_take_turns(monkeypatch):
    order = []
    monkeypatch.setattr(program, "_run", lambda seat, x: order.append(seat) or {"forward": 1.0, "backward": 2.0})
    monkeypatch.setattr(program, "_first_rank_says", lambda mine: mine)
    case = a_case(rounds=4, baseline="", budget=1e9)
    found = program._timed(case, {"a": "a", "b": "b", "c": "c"}, None)
    assert order == ["a", "b", "c", "c", "b", "a", "b", "c", "a", "a", "c", "b"]
    assert found["b"] == {"forward": [1.0] * 4, "backward": [2.0] * 4}


def test_two_rounds_are_run_whatever_they_take_and_no_more_once_the_time_is_up(monkeypatch):
    monkeypatch.setattr(program, "_run", lambda seat, x: {"forward": 1.0, "backward": 2.0})
    monkeypatch.setattr(program, "_first_rank_says", lambda mine: mine)
    found = program._timed(a_case(rounds=9, baseline="", budget=0.0), {"a": "a"}, None)
    assert len(found["a"]["forward"]) == 2


def test_a_pass_lasts_from_the_first_that_begins_to_the_last_that_is_done(monkeypatch):
    spans = [program.Span(1.0, 3.0, 3.5, 9.0), program.Span(1.5, 3.25, 3.75, 8.0)]
    monkeypatch.setattr(program, "_everybody", lambda mine: spans)
    monkeypatch.setattr(program, "_span", lambda *_: spans[0])
    seat = Seat(torch.arange(3), lambda q, k, v: q)
    assert program._run(seat, given(SMALL, Place(CPU, torch.float32))) == {"forward": 2.25, "backward": 5.5}


# ----------------------------------------------------------------------------------------------------- scenarios


def test_the_report_is_the_classic_table():
    wish = PRESETS["report"]
    assert (wish.tokens, wish.ranks) == ((4096, 8192, 16384, 32768, 65536), (1, 2, 4))
    found = cases("report", wish)
    assert [(case.shape.n, case.ranks) for case in found] == [(n, p) for n in wish.tokens for p in wish.ranks]
    for case in found:
        assert {contender.name for contender in case.contenders} == {
            *("longring ring", "longring ulysses", "longring gather"),
            *(DEEPSPEED, DATA_PARALLEL, ONE_PROCESS),
        }


def test_the_usual_has_every_schedule_layout_and_kernel_of_the_cpu():
    contenders = [contender for case in cases("usual", Wish()) for contender in case.contenders]
    schedules = {contender.schedule for contender in contenders}
    assert schedules >= {*("ring", "bidirectional", "double_ring", "exchange", "ulysses", "hybrid", "gather"), None}
    assert {contender.layout for contender in contenders} >= {"zigzag", "contiguous", "striped"}
    assert {contender.kernel for contender in contenders} >= {"sdpa", "reference"}


@pytest.mark.parametrize("name", SCENARIOS)
def test_names_are_told_apart_and_the_baseline_takes_part(name):
    for pattern in (CAUSAL, Dense(causal=False), Dense(window=(9, 0))):
        for case in SCENARIOS[name](replace(Wish(), pattern=pattern)):
            names = [contender.name for contender in case.contenders]
            assert len(set(names)) == len(names)
            assert case.baseline in names
            assert case.scenario == name


def test_torch_takes_no_part_where_there_is_a_window():
    for preset in OF_PRESET:
        for case in cases(preset, replace(Wish(), pattern=Dense(window=(9, 0)))):
            assert {contender.kind for contender in case.contenders if case.scenario != "dilated"} <= {"ours"}


@pytest.mark.parametrize(
    ("only", "said"), [(("speed",), "must be one of schedules"), (("layouts",), "nothing is left")]
)
def test_scenarios_that_are_none(only, said):
    with pytest.raises(ArgumentError, match=said):
        cases("usual", replace(Wish(), ranks=(1,)), only)


# ----------------------------------------------------------------------------------------------------------- runs


def a_row(case):
    return Row(case.title, "forward", "longring ring", time=Spread(1.0, 1.0, 1.0, 1), tokens=case.shape.n)


def a_run(monkeypatch, play_one, only=("kernels",), **wish):
    """A run whose cases are not played, and what was kept of the record after each."""
    monkeypatch.setattr(run, "play", play_one)
    record, kept = new_record("", CPU, True, real="", simulated=""), []
    wish = replace(PRESETS["usual"], **{**QUICK, "tokens": (64, 128, 256), **wish})
    keep = lambda: kept.append([row.tokens for row in record.scenarios["kernels"]])  # noqa: E731
    run.run_cases(cases("usual", wish, only), record, lambda case, rows: None, keep, pace=1e9)
    return record, kept


def test_the_record_is_kept_after_each_case(monkeypatch):
    played = lambda case, judge, timeout: contest.Played([a_row(case)], ["x: none"], [])  # noqa: E731
    record, kept = a_run(monkeypatch, played)
    assert kept == [[64], [64, 128], [64, 128, 256]]
    assert record.missing.count("x: none") == 1
    assert "ring-flash-attn: not installed" in record.missing
    assert record.failures == []


def test_a_case_that_breaks_leaves_the_others(monkeypatch):
    def played(case, judge, timeout):
        if case.shape.n == 128:
            raise LongringError("rank 1 is gone")
        return contest.Played([a_row(case)], [], [])

    record, kept = a_run(monkeypatch, played)
    assert kept[-1] == [64, 256]
    assert len(record.failures) == 1
    assert record.failures[0].endswith("rank 1 is gone")


def test_the_estimate_grows_with_the_work(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(run, "cores", lambda: 2)
    wish = Wish()
    one, four, long = (
        run.seconds_of(next(iter(SCENARIOS["report"](replace(wish, **told)))), 1e10)
        for told in ({"ranks": (1,)}, {"ranks": (4,)}, {"ranks": (1,), "tokens": (65536,)})
    )
    assert 0 < one < four  # in the setting of FSDP's users four ranks compute four sequences
    assert long > 20 * one
    assert run.measured_pace(cases("usual", replace(wish, tokens=(64,)))[0]) > 0


def test_the_document_shows_the_record():
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("write_tables", docs / "write_tables.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (docs / "bench.md").read_text()
    assert text == script.renewed(text), "run python docs/write_tables.py"
    assert "longring ring" in text.partition("<!-- ranks: from")[2]
