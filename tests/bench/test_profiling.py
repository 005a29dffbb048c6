"""Profiles: what real ranks did, put on one clock, and exported."""

import json
import sys
import time
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import profiled
from longring.bench.profiling import memory, rank, run, spans, trace
from longring.bench.profiling.memory import Account, Sample
from longring.bench.profiling.rank import Run
from longring.bench.profiling.spans import Span
from longring.errors import LongringError
from longring.geometry.patterns import Dense, Dilated
from longring.launching import launch
from longring.schedules.labels import Activity, Doing

RING = profiled.ASKED._replace(tokens=601, ranks=3, heads=4, kv_heads=2, head_dim=32, repeat=2)
DESKS = RING._replace(
    ranks=4,
    nodes=2,
    tokens=512,
    dtype=torch.bfloat16,
    pattern=Dilated([128, 512], [1, 2]),
    layout="contiguous",
    schedule="hybrid",
    repeat=1,
)


@pytest.fixture(scope="module")
def seen():
    return launch(rank.attend, RING, ranks=RING.ranks, backend="gloo", timeout=100)


@pytest.fixture(scope="module")
def ring(seen):
    return run.together(RING, seen)


@pytest.fixture(scope="module")
def desks():
    return run.profile(DESKS)


@pytest.fixture(params=["ring", "desks"])
def found(request):
    return request.getfixturevalue(request.param)


# ------------------------------------------------------------------------------------------------ on real ranks

pytestmark = pytest.mark.processes


def test_every_rank_did_everything_in_its_phases_one_after_the_other(found):
    for one in found.ranks:
        assert {span.kind for span in one.spans} == {"compute", "send", "wait", "merge", "post"}
        own = [span for span in one.spans if span.kind != "send"]
        for span in own:
            start, end = one.phases[span.phase]
            assert start <= span.start <= span.end <= end
        for before, after in pairwise(own):
            assert before.end <= after.start


def test_a_ring_computes_its_steps_in_order(ring):
    for one in ring.ranks:
        for phase, last in (("forward", 2), ("backward", 3)):
            steps = [span.step for span in one.spans if span.kind == "compute" and span.phase == phase]
            assert steps == list(range(last + 1))


def test_what_was_sent_is_what_was_planned(found):
    for one in found.ranks:
        assert one.bytes_sent == one.bytes_planned
        assert sum(one.bytes_sent.values()) > 0


def test_nothing_arrives_before_it_was_posted(found):
    """Which it would, were clocks apart."""
    events = list(trace.trace_events(found))
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) > 0
    for number, start in starts.items():
        assert start <= ends[number]


def test_components_sum_up_to_the_peak_and_are_near_the_prediction(found):
    for one in found.ranks:
        for phase, peak in one.peaks.items():
            assert sum(peak.components.values()) == peak.bytes
            said = one.predicted[phase]
            assert sum(said.components.values()) == said.bytes
            # a backward begins with the buffers that the forward has left, which its prediction does not count
            assert peak.bytes == pytest.approx(said.bytes, rel=0.02 if phase == "forward" else 0.1)


def test_inputs_and_results_have_the_bytes_they_have(ring):
    for one in ring.ranks:
        rows = {0: 201, 1: 200, 2: 200}[one.rank]
        held = one.peaks["backward"].components
        assert held["q"] == held["dout"] == rows * 4 * 32 * 4
        assert held["k"] == held["v"] == rows * 2 * 32 * 4
        assert held["lse"] == rows * 4 * 4


def test_memory_is_shown_at_moments_of_the_timed_run(found):
    for one in found.ranks:
        moments = [sample.at for sample in one.samples]
        assert moments == sorted(moments)
        assert one.phases["forward"][0] <= moments[0]
        assert moments[-1] <= max(end for _, end in one.phases.values())


def test_buffers_come_with_the_first_message_and_gradients_with_the_backward(ring):
    for one in ring.ranks:
        first = min(sample.at for sample in one.samples if memory.KEYS in sample.components)
        assert first <= next(span.start for span in one.spans if span.kind == "compute")
        travelling = [sample.at for sample in one.samples if memory.TRAVELLING in sample.components]
        assert min(travelling) >= one.phases["backward"][0]


def test_a_clock_that_is_ahead_is_set_back(seen, ring):
    """One rank on another machine, 1000 seconds ahead."""
    ahead = 1000.0
    shifted = replace(
        seen[1],
        offset=seen[1].offset - ahead,
        runs=[run._moved(one, ahead) for one in seen[1].runs],
        memory_run=run._moved(seen[1].memory_run, ahead),
        samples=[sample._replace(at=sample.at + ahead) for sample in seen[1].samples],
    )
    again = run.together(RING, [seen[0], shifted, seen[2]])
    for one, two in zip(ring.ranks[1].spans, again.ranks[1].spans, strict=True):
        assert (two.start, two.end) == pytest.approx((one.start, one.end), abs=1e-6)


def test_the_run_of_median_length_is_shown(seen):
    lengths = [run._length([one.runs[number] for one in seen], "forward") for number in range(2)]
    lengths = [a + run._length([one.runs[n] for one in seen], "backward") for n, a in enumerate(lengths)]
    assert run.together(RING, seen).chosen == lengths.index(min(lengths))  # of two the lower is the median one


def test_it_is_told_as_json(found):
    told = json.loads(json.dumps(run.told(found)))
    assert 0 <= told["overlap"] <= 1
    assert [one["rank"] for one in told["ranks"]] == list(range(found.asked.ranks))
    for one in told["ranks"]:
        assert {span["kind"] for span in one["spans"]} == {"compute", "send", "wait", "merge"}
        for span in one["spans"]:
            assert set(span) >= {"kind", "what", "phase", "step", "start", "end", "bytes"}
        assert one["peak_bytes"] == sum(one["components"].values())
        assert one["predicted_bytes"] == sum(one["predicted"].values())
        assert max(moment["bytes"] for moment in one["memory"]) <= one["peak_bytes"]
        for moment in one["memory"]:
            assert moment["bytes"] == sum(moment["components"].values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ranks_on_a_gpu_are_timed_by_the_device():
    asked = RING._replace(device="cuda", tokens=4096, dtype=torch.bfloat16, head_dim=64, ranks=2)
    found = run.profile(asked)
    for one in found.ranks:
        assert one.bytes_sent == one.bytes_planned
        for phase, (start, end) in one.phases.items():
            computed = [span for span in one.spans if span.kind == "compute" and span.phase == phase]
            assert all(start <= span.start < span.end <= end for span in computed)
        assert one.peaks["backward"].bytes >= one.samples[0].bytes > 0


# ------------------------------------------------------------------------------------------- what was hidden


def span(kind, start, end):
    return Span(kind, "", "forward", 0, start, end)


@pytest.mark.parametrize(
    ("given", "hidden"),
    [
        ([span("send", 0, 10), span("compute", 0, 10)], 1.0),
        ([span("send", 0, 10), span("wait", 0, 10)], 0.0),
        ([span("send", 0, 10), span("wait", 6, 8)], 0.8),
        ([span("send", 0, 10), span("wait", 9, 15)], 0.9),  # waiting without messages exposes none
        ([span("send", 0, 6), span("send", 4, 10), span("wait", 5, 6)], 0.9),  # two at once are one time
        ([span("compute", 0, 10)], None),
    ],
)
def test_the_share_of_communication_that_is_hidden(given, hidden):
    assert spans.hidden_share([given]) == (None if hidden is None else pytest.approx(hidden))


def test_moments_of_one_run_are_found_in_another():
    slow = Run({"forward": (0.0, 10.0)}, [], [2.0, 6.0])
    quick = Run({"forward": (100.0, 105.0)}, [], [101.0, 102.0])
    assert rank.on_another_run([-1.0, 0.0, 1.0, 4.0, 10.0, 11.0], slow, quick) == [100.0, 100.0, 100.5, 101.5, 105, 105]
    with pytest.raises(AssertionError, match="4 and 3 milestones"):
        rank.on_another_run([0.0], slow, quick._replace(boundaries=[101.0]))


# ------------------------------------------------------------------------------------------------------ memory

JOURNEY = SimpleNamespace(schedule="ring", name="rank 0 of 1, ring")


def activity(kind, what, phase="forward", **tensors):
    return Activity(kind, Doing(JOURNEY, phase, what, 1), **tensors)


def test_an_account_names_memory_by_what_is_done_with_it():
    account = Account()
    with account:
        q, k = torch.ones(100), torch.ones(10)
        account.own("q", q)
        account.own("k", k)
        arriving, packed = torch.empty(20), torch.empty(7)
        with account(activity("post", "keys and values", sends=((1, packed),), receives=((1, arriving),))):
            pass
        with account(activity("compute", "keys of 1", reads=(q, arriving, arriving))):
            total = torch.ones(100)
            brief = total * 2
            del brief
        with account(activity("merge", "results")):
            pass
        del packed
    highest = memory.highest(account.samples()).components
    assert highest == {"q": 400, "k": 40, memory.KEYS: 80 + 28, memory.OUT: 400, memory.WORKSPACE: 400}
    assert account.samples()[-1].components == {"q": 400, "k": 40, memory.KEYS: 80, memory.OUT: 400}
    assert total.sum() == 100


def test_a_buffer_that_is_used_for_something_else_is_called_so_from_then_on():
    account = Account()
    with account:
        buffer = torch.empty(25)
        with account(activity("post", "keys and values", receives=((1, buffer),))):
            pass
        with account(activity("post", "gradients", "backward", receives=((1, buffer),))):
            pass
    named = [sample.components for sample in account.samples()]
    assert named == [{memory.KEYS: 100}, {memory.TRAVELLING: 100}]


def test_what_only_a_result_leaves_is_a_gradient_in_a_backward():
    account = Account()
    with account:
        with account(activity("compute", "own keys", "backward")):
            total = torch.ones(25)
        with account(activity("merge", "gradients of queries", "backward")):
            rounded = total.to(torch.bfloat16)
    assert account.samples()[-1].components == {memory.GRADIENTS: 150}
    assert rounded.sum() == 25


def test_what_stays_for_later_calls_is_a_buffer():
    account = Account()
    with account:
        with account(activity("compute", "keys of 1", "backward")):
            kept, total = torch.ones(25), torch.ones(10)
        with account(activity("merge", "gradients of queries", "backward")):
            pass
        del total
        over = time.monotonic()
    highest = memory.highest(account.samples({"backward": (0.0, over)}))
    assert highest.components == {memory.TRAVELLING: 100, memory.GRADIENTS: 40}
    assert kept.sum() == 25


def test_a_prediction_is_told_in_the_same_names():
    said = {"q": 1, "K/V at hand": 2, "K/V arriving": 3, "dK/dV leaving": 4, "dk": 5, "delta": 6, "merging": 7}
    want = {"q": 1, memory.KEYS: 5, memory.TRAVELLING: 4, memory.GRADIENTS: 5, memory.WORKSPACE: 13}
    assert memory.in_these_names(said, "backward") == want
    assert memory.in_these_names({"results at desks": 8}, "forward") == {memory.OUT: 8}


def test_thinning_keeps_the_peak():
    samples = [Sample(float(at), {"q": 1000 if at == 777 else at % 7}) for at in range(1000)]
    few = memory.thinned(samples, 50)
    assert len(few) <= 51
    assert memory.highest(few) == memory.highest(samples)
    assert memory.thinned(samples[:50], 50) == samples[:50]


# ---------------------------------------------------------------------------------------------------- the trace


def slices(events):
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


@pytest.fixture(params=["ring", "desks", "by hand"])
def events(request, tmp_path):
    profile = profiled.profile_of_two() if request.param == "by hand" else request.getfixturevalue(request.param)
    path = tmp_path / "trace.json"
    trace.write_trace(profile, path)
    told = json.loads(path.read_text())
    assert told["displayTimeUnit"] == "ms"
    return told["traceEvents"]


def test_slices_of_a_thread_nest(events):
    for of_thread in slices(events).values():
        open_until = []
        for event in sorted(of_thread, key=lambda event: (event["ts"], -event["dur"])):
            start, end = event["ts"], event["ts"] + event["dur"]
            while open_until and open_until[-1] <= start + 0.002:  # microseconds, rounded to thousandths
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.002
            open_until.append(end)


def test_arrows_lead_from_a_slice_of_messages_to_another_of_the_peer(events):
    on = slices(events)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        sent, received = (_around(on[event["pid"], event["tid"]], event["ts"]) for event in (start, end))
        assert end["pid"] in sent["args"]["to"]
        assert start["pid"] in received["args"]["from"]
        assert (sent["args"]["phase"], sent["name"]) == (received["args"]["phase"], received["name"])


def _around(of_thread, moment):
    (found,) = (one for one in of_thread if one["ts"] <= moment < one["ts"] + max(one["dur"], 0.001))
    assert found["cat"] == "send"
    return found


def test_every_rank_is_a_named_process_with_its_memory(events):
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {number: f"rank {number}" for number in names}
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert threads.keys() == slices(events).keys()
    assert {threads[number, 0] for number in names} == {"work"}
    assert {event["pid"] for event in events if event["ph"] == "C"} == set(names)


def test_the_trace_of_a_profile_by_hand():
    events = list(trace.trace_events(profiled.profile_of_two()))
    arrows = [(event["pid"], event["ts"]) for event in events if event["ph"] == "s"]
    assert sorted(arrows) == [(0, 0.0), (0, 10e6), (1, 0.1e6), (1, 10.1e6)]  # K and V of a post are one arrow
    computed = [event for event in events if event["ph"] == "X" and event["cat"] == "compute"]
    assert len(computed) == 8
    assert computed[1]["name"] == "step 1: keys of 1"
    assert (computed[1]["ts"], computed[1]["dur"]) == (4e6, 2e6)


def test_messages_at_the_same_time_have_threads_of_their_own():
    one = profiled.rank_of_two(0)
    more = [Span("send", "gradients", "forward", 1, 1.0, 5.0, ((1, 8),), ()), Span("send", "x", "forward", 2, 4.5, 6.0)]
    threads = {span.what: thread for span, thread in trace._placed(replace(one, spans=[one.spans[1], *more]))}
    assert threads == {"keys and values": 1, "gradients": 2, "x": 1}


# --------------------------------------------------------------------------------------------------- the picture


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_drawn(tmp_path, ending):
    pytest.importorskip("matplotlib")
    from longring.bench.profiling.picture import draw

    path = tmp_path / f"profile.{ending}"
    draw(profiled.profile_of_two(), path, "By hand")
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in start
    assert path.stat().st_size > 10_000


def test_a_brief_peak_is_drawn_as_wide_as_a_column():
    from longring.bench.profiling.picture import in_columns

    samples = [Sample(0.0, {"q": 1}), Sample(5.2, {"q": 9}), Sample(5.200001, {"q": 2})]
    drawn = in_columns(samples, 10.0, columns=10)
    assert [sample.at for sample in drawn] == list(range(10))
    assert [sample.bytes for sample in drawn] == [1, 1, 1, 1, 1, 9, 2, 2, 2, 2]


def test_predicted_steps_are_drawn_where_the_steps_were():
    from longring.bench.profiling.picture import predicted_stretches

    one = profiled.rank_of_two(0)
    assert predicted_stretches(one, "forward") == [(0.0, 4.0, 1300), (4.0, 6.6, 1410)]
    assert predicted_stretches(one, "backward") == [(10.0, 16.6, 2300)]  # no steps are told


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    from longring.bench.profiling.picture import draw

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LongringError, match=r"pip install longring\[plot\]"):
        draw(profiled.profile_of_two(), tmp_path / "profile.png", "By hand")


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layout": "dealt"}, "needs documents"),
        ({"schedule": "sing"}, "schedule must be one of"),
        ({"kernel": "flash"}, "CUDA"),
        ({"pattern": Dense(causal=True, documents=[0, 3, 999])}, "999"),
    ],
)
def test_what_ranks_would_refuse_is_refused_before_they_start(change, named):
    with pytest.raises(LongringError, match=named):
        run.check(RING._replace(**change))
