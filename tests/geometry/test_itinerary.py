"""What travels: every receive has its send, in one order on both sides, and brings exactly what tiles need."""

import time
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enumeration import add_tile, expected_pairs, no_pairs, positions, standings
from longring.geometry import itinerary, layouts
from longring.geometry.itinerary import (
    ITINERARIES,
    Task,
    at_rank,
    exchange,
    gather,
    ring,
    runs_over_sources,
    runs_over_targets,
    tiles_between,
)
from longring.geometry.layouts import deal, from_ranges
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.kernels.contract import Upstream
from longring.kernels.reference import ReferenceKernel
from longring.schedules.contract import Journey
from longring.schedules.select import SCHEDULES
from strategies import limits_only, tasks

every_schedule = pytest.mark.parametrize("schedule", list(ITINERARIES))


def plan(task, schedule):
    return [ITINERARIES[schedule](task, rank) for rank in range(task.ranks)]


# ------------------------------------------------------------------------------------------- runs of ranks


@given(tasks(patterns=limits_only, max_ranks=40), st.data())
def test_runs_are_exactly_the_tiles_of_every_pair(task, data):
    """Limits alone are compressed into runs: the compression must not be seen, number for number."""
    own = data.draw(st.integers(0, task.ranks - 1))
    sources, targets = runs_over_sources(task, own), runs_over_targets(task, own)
    for other in range(task.ranks):
        assert at_rank(sources, other) == tiles_between(task, own, other)
        assert at_rank(targets, other) == tiles_between(task, other, own)


@given(tasks())
def test_runs_of_any_pattern_are_the_tiles_of_every_pair(task):
    for target in range(task.ranks):
        for source in range(task.ranks):
            tiles = tiles_between(task, target, source)
            assert at_rank(runs_over_sources(task, target), source) == tiles
            assert at_rank(runs_over_targets(task, source), target) == tiles


@given(tasks(patterns=limits_only, max_ranks=40), st.data())
def test_runs_are_all_ranks_in_turn(task, data):
    own = data.draw(st.integers(0, task.ranks - 1))
    for runs in (runs_over_sources(task, own), runs_over_targets(task, own)):
        assert [rank for run in runs for rank in run.ranks] == list(range(task.ranks))


@pytest.mark.parametrize("names", [("striped", "striped"), ("zigzag", "striped"), ("striped", "contiguous")])
@pytest.mark.parametrize("window", [None, (9, 0), (5, 3), (0, 0)])
@pytest.mark.parametrize("lengths", [(160, 160), (123, 160), (160, 90)])
def test_runs_of_mixed_layouts_are_exact_over_40_ranks(names, window, lengths):
    (n_q, n_k), causal = lengths, window != (5, 3)
    queries, keys = (deal(name, n, 40) for name, n in zip(names, lengths, strict=True))
    task = Task(Dense(causal=causal, window=window), Problem(1, n_q, n_k, 1, n_k - n_q), queries, keys)
    for target in range(0, 40, 3):
        runs = runs_over_sources(task, target)
        assert [at_rank(runs, source) for source in range(40)] == [tiles_between(task, target, s) for s in range(40)]


@pytest.mark.parametrize("offset", [0, 2])
def test_runs_tell_the_square_of_equal_positions_from_tiles_that_look_like_it(offset):
    """Each half of the sequence striped: over earlier ranks' keys the pieces have the limits of one's own."""
    halves = from_ranges([[range(rank, 8, 4), range(8 + rank, 16, 4)] for rank in range(4)])
    task = Task(Dense(), Problem(1, 16, 16, 1, offset), halves, halves)
    for target in range(4):
        runs = runs_over_sources(task, target)
        assert [at_rank(runs, source) for source in range(4)] == [tiles_between(task, target, s) for s in range(4)]


def test_a_dense_plan_over_thousands_of_ranks_is_a_handful_of_runs():
    for name in ("contiguous", "zigzag", "striped"):
        assert len(runs_over_sources(long_dense_task(name), 1234)) < 40


# ------------------------------------------------------------------------------------------------- parcels


@every_schedule
@given(task=tasks())
def test_every_receive_has_its_send(schedule, task):
    stops = [stop for stops in plan(task, schedule) for stop in stops]
    assert Counter(stop.sends for stop in stops) == Counter(stop.receives for stop in stops)
    assert Counter(stop.gradient_sends for stop in stops) == Counter(stop.gradient_receives for stop in stops)


@every_schedule
@given(task=tasks())
def test_ranks_send_their_own_letters_to_others_and_never_empty_ones(schedule, task):
    for rank, stops in enumerate(plan(task, schedule)):
        for stop in stops:
            for parcel in filter(None, (stop.sends, stop.gradient_sends)):
                assert parcel.sender == rank != parcel.receiver
                assert parcel.vectors > 0
            for parcel in filter(None, (stop.receives, stop.gradient_receives)):
                assert parcel.receiver == rank != parcel.sender


@every_schedule
@given(task=tasks())
def test_what_is_sent_is_the_senders_own_or_was_received_before(schedule, task):
    for rank, stops in enumerate(plan(task, schedule)):
        at_hand = {rank}
        for stop in stops:
            assert stop.sends is None or stop.sends.owner in at_hand
            if stop.receives is not None:
                assert stop.receives.owner == stop.source
                at_hand.add(stop.source)
            if stop.gradient_sends is not None:  # only of what was computed with; the home of a gather comes last
                assert stop.gradient_sends.owner == stop.source != rank


@every_schedule
@given(task=tasks())
def test_the_keys_of_every_tile_are_there_and_nothing_is_computed_twice(schedule, task):
    counts = no_pairs(task)
    for stops, mine in zip(plan(task, schedule), map(positions, task.queries.shards), strict=True):
        for stop in stops:
            keys = [range(task.problem.n_k)] if schedule == "gather" else task.keys.shards[stop.source]
            for tile in stop.tiles:
                add_tile(counts, tile, mine, positions(keys))
    assert (counts == expected_pairs(task)).all()


@given(tasks())
def test_every_gradient_comes_home(task):
    """In a ring the last to add to a block sends it to its owner."""
    for rank, stops in enumerate(plan(task, "ring")):
        homeward = stops[-1].gradient_receives
        assert homeward is None or homeward.owner == rank
        assert (homeward is None) == (task.ranks == 1 or task.keys.sizes[rank] == 0)


def vectors_named(task, tiles, rows):
    """[batch, kv_heads, rows]: whether some tile names the key row."""
    named = np.zeros((task.problem.batch, task.problem.kv_heads, rows), dtype=bool)
    for tile in tiles:
        for _, cols in standings(tile):
            named[np.ix_(tile.batch, tile.kv_heads, cols)] = True
    return named


@given(tasks())
def test_an_exchange_moves_exactly_the_rows_that_tiles_name_each_once(task):
    for rank in range(task.ranks):
        for stop in exchange(task, rank)[1:]:
            rows = task.keys.sizes[stop.source]
            moved = np.zeros((task.problem.batch, task.problem.kv_heads, rows), dtype=int)
            for share in stop.receives.shares if stop.receives else ():
                for part in share.rows:
                    moved[np.ix_(share.batch, share.kv_heads, part)] += 1
            assert (moved == vectors_named(task, stop.tiles, rows)).all()
            assert moved.sum() == (stop.receives.vectors if stop.receives else 0)


@every_schedule
@given(task=tasks())
def test_frames_have_room_for_all_rows(schedule, task):
    for stops in plan(task, schedule):
        for stop in stops:
            for parcel in filter(None, (stop.sends, stop.receives, stop.gradient_sends, stop.gradient_receives)):
                rows = {row for share in parcel.shares for part in share.rows for row in part}
                assert rows <= set(parcel.frame)
                assert (min(rows), max(rows)) == (parcel.frame[0], parcel.frame[-1])


def test_rings_and_gathers_move_whole_shards():
    layout = deal("zigzag", 10, 3)
    task = Task(Dense(), Problem(2, 10, 10, 3, 0), layout, layout)
    for make in (ring, gather):
        for stop in make(task, 1):
            for parcel in filter(None, (stop.sends, stop.receives)):
                assert parcel.vectors == 2 * 3 * layout.sizes[parcel.owner]
                assert parcel.frame == range(layout.sizes[parcel.owner])


# --------------------------------------------------------------------------------- in which order they are posted


def posts(stops, schedule, phase):
    """(sent, expected) parcels of one rank in the order in which its schedule posts them."""
    moving = [stop for stop in stops if stop.source != stops[0 if schedule != "gather" else -1].source]
    rows = [(stop.sends, stop.receives) for stop in moving]
    gradients = [(stop.gradient_sends, stop.gradient_receives) for stop in moving]
    if phase == "forward":
        return rows
    if schedule == "gather":  # collects first, then scatters
        return rows + gradients
    # while a stop is computed, the rows of the next are under way: its gradients are posted behind them
    order = rows[:1]
    for number, gradient in enumerate(gradients, start=1):
        order += [*rows[number : number + 1], gradient]
    return order


def channels(letters_of_ranks, side):
    """On each ordered channel (from, to) the parcels of one side, in order."""
    found = defaultdict(list)
    for letters in letters_of_ranks:
        for letter in letters:
            if (parcel := letter[side]) is not None:
                found[parcel.sender, parcel.receiver].append(parcel)
    return found


@every_schedule
@pytest.mark.parametrize("phase", ["forward", "backward"])
@given(task=tasks())
def test_on_each_channel_parcels_are_expected_in_the_order_they_are_sent(schedule, phase, task):
    letters = [posts(stops, schedule, phase) for stops in plan(task, schedule)]
    assert channels(letters, side=0) == channels(letters, side=1)


class Recorder:
    """A transport that delivers nothing and notes who was to be sent how many numbers, in order."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.sent, self.expected, self.timeouts = [], [], set()

    def post(self, sends, receives, *, what, terms=None, timeout=None):
        self.sent += [(peer, x.numel()) for peer, x in sends]
        self.expected += [(peer, x.zero_().numel()) for peer, x in receives]
        self.timeouts.add(timeout)
        return self

    def wait(self):
        pass


@every_schedule
@pytest.mark.parametrize(
    "task",
    [
        Task(Dense(), Problem(1, 11, 11, 2, 0), *[deal("zigzag", 11, 4)] * 2),
        Task(Dense(window=(3, 0)), Problem(2, 13, 13, 1, 0), *[deal("contiguous", 13, 5)] * 2),
        Task(Dilated([8, 16], [1, 3]), Problem(1, 30, 30, 3, 0), *[deal("striped", 30, 4)] * 2),
        Task(Dense(), Problem(1, 2, 2, 1, 0), *[deal("contiguous", 2, 4)] * 2),  # ranks that hold nothing
    ],
    ids=["zigzag", "window", "dilated", "empty ranks"],
)
def test_schedules_post_in_the_order_that_is_assumed_here(schedule, task):
    for rank in range(task.ranks):
        stops = ITINERARIES[schedule](task, rank)
        mine, keys = task.queries.sizes[rank], task.keys.sizes[rank]
        problem, d = task.problem, 4
        q = torch.zeros(problem.batch, mine, problem.kv_heads, d)
        k = torch.zeros(problem.batch, keys, problem.kv_heads, d)
        lse = torch.zeros(problem.batch, problem.kv_heads, mine)
        for phase in ("forward", "backward"):
            recorder = Recorder(rank, task.ranks)
            journey = Journey(task, stops, recorder, ReferenceKernel(), schedule, 1.0, None)
            if phase == "forward":
                SCHEDULES[schedule].forward(journey, q, k, k)
            else:
                SCHEDULES[schedule].backward(journey, Upstream(q, None, q, lse), q, k, k)
            letters = posts(stops, schedule, phase)
            twice = [(0, 1), (0, 1)]  # keys, then values
            assert recorder.sent == [(s.receiver, s.vectors * d) for s, _ in letters if s for _ in twice]
            assert recorder.expected == [(r.sender, r.vectors * d) for _, r in letters if r for _ in twice]


@every_schedule
def test_schedules_hand_the_timeout_on(schedule):
    """An argument that a path does not honour would be silently ignored."""
    layout = deal("contiguous", 6, 3)
    task = Task(Dense(causal=False), Problem(1, 6, 6, 1, 0), layout, layout)
    recorder, q = Recorder(0, 3), torch.zeros(1, 2, 1, 4)
    journey = Journey(task, ITINERARIES[schedule](task, 0), recorder, ReferenceKernel(), schedule, 1.0, 7.5)
    SCHEDULES[schedule].forward(journey, q, q, q)
    SCHEDULES[schedule].backward(journey, Upstream(q, None, q, torch.zeros(1, 1, 2)), q, q, q)
    assert recorder.timeouts == {7.5}


# --------------------------------------------------------------------------------------- what planning costs


def forget():
    """Every cache of geometry, so that a plan is made anew."""
    for module in (itinerary, layouts):
        for thing in vars(module).values():
            if hasattr(thing, "cache_clear"):
                thing.cache_clear()


def best_of_three(job):
    """Seconds; the best, since other work on the machine can only add."""
    times = []
    for _ in range(3):
        forget()
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return min(times)


def long_dense_task(name="zigzag"):
    layout = deal(name, 1_000_000, 4096)
    return Task(Dense(), Problem(1, layout.length, layout.length, 8, 0), layout, layout)


def test_a_dense_plan_of_one_rank_of_4096_takes_a_moment():
    assert best_of_three(lambda: list(ring(long_dense_task(), 1234))) < 0.1


def test_all_4096_ranks_of_a_dense_plan_take_seconds():
    def job():
        task = long_dense_task()
        for rank in range(task.ranks):
            ring(task, rank)

    assert best_of_three(job) < 5


def test_a_longnet_plan_takes_less_than_a_second():
    segments = [2048 << i for i in range(5)]
    pattern = Dilated(segments, [segment // 2048 for segment in segments])

    def job():
        layout = deal("contiguous", 1 << 20, 64)
        exchange(Task(pattern, Problem(1, layout.length, layout.length, 32, 0), layout, layout), 33)

    assert best_of_three(job) < 1


def test_tasks_over_equal_values_are_one_task():
    """Plans are cached by value: a new call with the same numbers finds the old plan."""
    layout = from_ranges([[range(5)], [range(5, 10)]])
    one, other = (
        Task(Dense(), Problem(1, 10, 10, 1, 0), dealt, dealt) for dealt in (layout, deal("contiguous", 10, 2))
    )
    assert one == other
    assert hash(one) == hash(other)
    assert ring(one, 0) is ring(other, 0)
