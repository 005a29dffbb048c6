"""Plans: every receive has its send, in one order on both sides, nothing waits for ever, and nothing is missing."""

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enumeration import add_tile, expected_pairs, standings
from longring.geometry import itinerary
from longring.geometry import task as tasks_module
from longring.geometry.itinerary import direction, double_ring, exchange, halves, ring
from longring.geometry.layouts import deal, from_ranges
from longring.geometry.looks import looks
from longring.geometry.needs import rows_seen
from longring.geometry.patterns import Dense, Dilated, Problem
from longring.geometry.plans import PLANS, plan
from longring.geometry.routes import DoubleRing, Ring, Star
from longring.geometry.task import Task, tiles_between
from longring.kernels.contract import Upstream
from longring.kernels.reference import ReferenceKernel
from longring.plan.traffic import BYTES
from longring.schedules.contract import Journey
from longring.schedules.select import SCHEDULES
from strategies import tasks

every_schedule = pytest.mark.parametrize("schedule", list(PLANS))
both_phases = pytest.mark.parametrize("phase", ["forward", "backward"])


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def nodes(draw, task):
    return draw(st.sampled_from(divisors(task.ranks)))


def plans(task, schedule, node_ranks=None):
    return [plan(schedule, task, rank, node_ranks) for rank in range(task.ranks)]


def posts_of(task, schedule, phase, node_ranks=None):
    """By rank, everything it posts in order."""
    return [list(getattr(made, phase)()) for made in plans(task, schedule, node_ranks)]


# --------------------------------------------------------------------------------------------------- routes


@pytest.mark.parametrize(
    "route",
    [
        Ring(1, 1),
        Ring(5, 1),
        Ring(6, -1),
        Star(5),
        DoubleRing(6, 1),
        DoubleRing(6, 2),
        DoubleRing(6, 3),
        DoubleRing(6, 6),
        DoubleRing(8, 4, -1),
        DoubleRing(6, 3, -1),
    ],
    ids=repr,
)
def test_at_every_step_each_rank_has_one_guest_and_over_all_steps_everybody(route):
    everybody = list(range(route.size))
    for step in range(route.steps):
        assert sorted(route.host(owner, step) for owner in everybody) == everybody
        assert all(route.guest(route.host(owner, step), step) == owner for owner in everybody)
    for owner in everybody:
        assert sorted(route.host(owner, step) for step in range(route.steps)) == everybody
        assert route.host(owner, 0) == owner
        for step in range(1, route.steps):
            for part in (route.served(step), route.chain(step)):
                hosts = sorted(rank for some in route.hosts(owner, part) for rank in some)
                assert hosts == sorted(route.host(owner, other) for other in part)


@pytest.mark.parametrize("size", range(1, 13))
def test_what_a_rank_of_a_double_ring_hands_on_reaches_all_it_serves(size):
    for inner in divisors(size):
        route = DoubleRing(size, inner)
        reached = {0}
        for step in range(size):
            assert step in reached
            reached |= set(route.leaving(step))
        for step in range(1, size):
            assert step in route.leaving(route.origin(step))
            assert step in route.served(step)
            for later in route.leaving(step):
                assert set(route.served(later)) <= set(route.served(step))


# ------------------------------------------------------------------------------------------------- who needs what


@given(tasks(), st.data())
def test_rows_seen_are_never_too_few(task, data):
    owner = data.draw(st.integers(0, task.ranks - 1))
    some = sorted(data.draw(st.sets(st.integers(0, task.ranks - 1))))
    found = {row for r in rows_seen(task, owner, [range(rank, rank + 1) for rank in some]) for row in r}
    for rank in some:
        for tile in tiles_between(task, rank, owner):
            for _, cols in standings(tile):
                assert set(cols) <= found
    assert found <= set(range(task.keys.sizes[owner]))


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
@pytest.mark.parametrize("window", [None, (7, 0), (20, 0)])
def test_rows_seen_of_causal_rows_and_windows_are_exact(name, window):
    layout = deal(name, 60, 5)
    task = Task(Dense(window=window), Problem(1, 60, 60, 1, 0), layout, layout)
    for owner in range(5):
        for rank in range(5):
            named = {col for tile in tiles_between(task, rank, owner) for _, cols in standings(tile) for col in cols}
            assert {row for r in rows_seen(task, owner, [range(rank, rank + 1)]) for row in r} == named


# ------------------------------------------------------------------------------------------------- parcels


@every_schedule
@both_phases
@given(data=st.data(), task=tasks())
def test_every_receive_has_its_send_at_the_same_post_of_both(schedule, phase, task, data):
    """Parcels of one channel are expected in the order they are sent."""
    node_ranks = data.draw(nodes(task))
    sent, expected = defaultdict(list), defaultdict(list)
    for rank, posts in enumerate(posts_of(task, schedule, phase, node_ranks)):
        for post in posts:
            for _, parcel in post.sends:
                assert parcel.sender == rank != parcel.receiver
                assert parcel.vectors > 0
                sent[rank, parcel.receiver].append(parcel)
            for _, parcel in post.receives:
                assert parcel.receiver == rank != parcel.sender
                expected[parcel.sender, rank].append(parcel)
    assert sent == expected


@every_schedule
@given(data=st.data(), task=tasks())
def test_every_pair_is_computed_as_often_as_it_counts(schedule, task, data):
    node_ranks = data.draw(nodes(task))
    share = data.draw(st.integers(1, 3))
    task = Task(task.pattern, task.problem, task.queries, task.keys, task.problem.kv_heads * share)
    want = expected_pairs(task)
    counts = np.zeros((task.problem.batch, task.heads, *want.shape[2:]), dtype=np.int64)
    for made in plans(task, schedule, node_ranks):
        for step in looks(made):
            for look in step:
                here = np.zeros((task.problem.batch, len(look.kv_heads), *want.shape[2:]), dtype=np.int64)
                for tile in look.tiles:
                    add_tile(here, tile, np.array(look.queries), np.array(look.keys))
                counts[:, look.heads] += here.repeat(len(look.heads) // len(look.kv_heads), axis=1)
    assert (counts == want.repeat(share, axis=1)).all()


@every_schedule
@given(data=st.data(), task=tasks())
def test_what_a_rank_sends_on_it_has(schedule, task, data):
    """Rows that leave are the sender's own, or arrived before, and gradients are of what arrived."""
    if schedule not in ("ring", "bidirectional", "double_ring", "exchange"):
        return
    for rank, made in enumerate(plans(task, schedule, data.draw(nodes(task)))):
        at_hand = {}
        for step in made:
            at_hand = {visit.lane: rows_of(visit.arrived) for visit in step.visits}
            for post in step.posts:
                for lane, parcel in post.sends:
                    assert parcel.owner == rank if lane == itinerary.HOME else rows_of(parcel) <= at_hand[lane]
            for lane, parcel in step.gradients.sends if step.gradients else ():
                assert rows_of(parcel) <= at_hand[lane]


def rows_of(parcel):
    return {
        (b, h, row)
        for share in parcel.shares
        for b in share.batch
        for h in share.kv_heads
        for r in share.rows
        for row in r
    }


@every_schedule
@given(data=st.data(), task=tasks())
def test_every_gradient_comes_home_once(schedule, task, data):
    """What a rank adds to a visitor's rows reaches the owner: along the chain each row is handed on or sent home."""
    if schedule not in ("ring", "bidirectional", "double_ring", "exchange"):
        return
    touched, home = defaultdict(set), defaultdict(Counter)
    for made in plans(task, schedule, data.draw(nodes(task))):
        for step in made:
            for visit in step.visits:
                mine = {
                    (b, h, visit.arrived.frame[col])
                    for tiles in visit.tiles
                    for tile in tiles
                    for _, cols in standings(tile)
                    for b in tile.batch
                    for h in tile.kv_heads
                    for col in cols
                }
                leaving = Counter(row for parcel in visit.takes for row in rows_of(parcel))
                came = rows_of(visit.brings) if visit.brings else set()
                assert all(count == 1 for count in leaving.values())
                assert mine | came <= set(leaving)
                touched[visit.owner] |= mine
                for parcel in visit.takes:
                    if parcel.receiver == visit.owner:
                        home[visit.owner].update(rows_of(parcel))
    for owner, rows in touched.items():
        assert rows <= set(home[owner])


@given(tasks())
def test_an_exchange_moves_exactly_the_rows_that_tiles_name_each_once(task):
    for rank in range(task.ranks):
        for step in exchange(task, rank)[1:]:
            for visit in step.visits:
                named = Counter()
                for share in visit.arrived.shares:
                    named.update(
                        (b, h, row) for b in share.batch for h in share.kv_heads for r in share.rows for row in r
                    )
                assert set(named.values()) == {1}
                tiles = tiles_between(task, rank, visit.owner)
                want = {
                    (b, h, col)
                    for tile in tiles
                    for _, cols in standings(tile)
                    for b in tile.batch
                    for h in tile.kv_heads
                    for col in cols
                }
                assert set(named) == want


# ---------------------------------------------------------------------------------------- only what is needed


def causal_task(name, n, ranks, **pattern):
    layout = deal(name, n, ranks)
    return Task(Dense(**pattern), Problem(1, n, n, 1, 0), layout, layout)


def rows_sent(task, schedule, rank, node_ranks=None):
    posts = plan(schedule, task, rank, node_ranks).forward()
    return sum(parcel.vectors for post in posts for _, parcel in post.sends)


def test_a_causal_zigzag_goes_down_and_moves_three_quarters():
    task = causal_task("zigzag", 80, 8)  # ten rows a rank
    assert direction(task) == -1
    owned = [sum(lane.vectors for lane in ring(task, 0).lanes[0].carried(o, t)) for o in range(8) for t in range(1, 8)]
    assert sum(owned) == sum(10 * owner + 5 * (7 - owner) for owner in range(8)) == 0.75 * 8 * 7 * 10
    assert sum(rows_sent(task, "ring", rank) for rank in range(8)) == sum(owned)


def test_a_causal_contiguous_ring_goes_up_and_moves_half():
    task = causal_task("contiguous", 80, 8)
    assert direction(task) == +1
    assert [rows_sent(task, "ring", rank) for rank in range(8)] == [10 * (rank + 1) for rank in range(7)] + [0]


def test_a_ring_without_causality_moves_everything():
    task = causal_task("contiguous", 80, 8, causal=False)
    assert [rows_sent(task, "ring", rank) for rank in range(8)] == [70] * 8


def test_both_directions_halve_the_busiest_link():
    for task in (causal_task("contiguous", 80, 8, causal=False), causal_task("zigzag", 80, 8)):
        one, both = (busiest_link(task, schedule) for schedule in ("ring", "bidirectional"))
        assert one == 70
        assert both == 35


def busiest_link(task, schedule):
    links = Counter()
    for rank in range(task.ranks):
        for post in plan(schedule, task, rank).forward():
            for _, parcel in post.sends:
                links[rank, parcel.receiver] += parcel.vectors
    return max(links.values())


def test_a_window_moves_its_halo_whatever_the_relay():
    task = causal_task("contiguous", 80, 8, window=(4, 0))
    for schedule in ("ring", "exchange"):
        assert [rows_sent(task, schedule, rank) for rank in range(8)] == [4] * 7 + [0]


def test_a_wide_window_is_handed_on_by_a_ring_and_gets_narrower():
    task = causal_task("contiguous", 80, 8, window=(14, 0))
    posts = [parcel for post in ring(task, 3).forward() for _, parcel in post.sends]
    assert [(parcel.owner, parcel.vectors) for parcel in posts] == [(3, 10), (2, 4)]


def test_documents_move_nothing_between_ranks_that_share_none():
    layout = deal("contiguous", 40, 4)
    task = Task(Dense(documents=[0, 10, 25, 30, 40]), Problem(1, 40, 40, 1, 0), layout, layout)
    for schedule in ("ring", "exchange"):
        assert [rows_sent(task, schedule, rank) for rank in range(4)] == [0, 10, 0, 0]


def test_both_directions_do_not_go_round_the_wrong_way():
    """Of a window or of causal contiguous rows, nothing has to go down."""
    for pattern in ({"window": (4, 0)}, {}):
        task = causal_task("contiguous", 80, 8, **pattern)
        one, both = ([rows_sent(task, schedule, rank) for rank in range(8)] for schedule in ("ring", "bidirectional"))
        assert one == both


def test_a_double_ring_goes_the_way_on_which_less_travels():
    task = causal_task("zigzag", 80, 8)
    assert double_ring(task, 0, 4).lanes[0].route.direction == -1
    assert sum(rows_sent(task, "double_ring", rank, 4) for rank in range(8)) < 0.85 * 8 * 70


def test_a_double_ring_crosses_between_nodes_once_a_round():
    task = causal_task("contiguous", 80, 8, causal=False)
    for rank in range(8):
        crossing = Counter()
        for post in double_ring(task, rank, 4).forward():
            for _, parcel in post.sends:
                crossing[parcel.receiver // 4 != rank // 4] += parcel.vectors
        assert crossing == {False: 60, True: 10}


def test_halves_are_cut_between_the_chunks_of_a_zigzag():
    early, late = halves(causal_task("zigzag", 83, 4))
    assert [shard[0].stop for shard in early.keys.shards] == [11, 22, 33, 43]
    assert all(len(shard) == 1 for half in (early, late) for shard in half.keys.shards)


# ------------------------------------------------------------------------------------- by heads, for any number


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("share", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
def test_heads_are_dealt_evenly_for_any_number_of_heads_and_ranks(kv_heads, share, ranks):
    """Every (head, query) at one desk, and no rank with more than its share and a row of each head it shares."""
    n = 64
    layout = deal("contiguous", n, ranks)
    task = Task(Dense(causal=False), Problem(1, n, n, kv_heads, 0), layout, layout, kv_heads * share)
    seats, loads = Counter(), []
    for rank in range(ranks):
        found = plan("ulysses", task, rank).desks
        for desk in found:
            seats.update((head, position) for head in desk.heads for r in desk.queries for position in r)
            assert {head // share for head in desk.heads} == set(desk.kv_heads)
        loads.append(sum(len(desk.heads) * sum(map(len, desk.queries)) for desk in found))
    assert set(seats.values()) == {1}
    assert len(seats) == task.heads * n
    assert max(loads) - min(loads) <= 2 * task.heads


def test_ulysses_takes_kept_rows_and_leaves_near_branches_at_home():
    """A branch that fits a rank moves nothing; of one of rate 4 every head moves a quarter of its rows."""
    layout = deal("contiguous", 64, 4)
    near, far = (16, 1), (64, 4)
    task = Task(Dilated(*zip(near, far, strict=True)), Problem(1, 64, 64, 4, 0), layout, layout)
    for rank in range(4):
        kinds = Counter()
        for post in plan("ulysses", task, rank).forward():
            for _, delivery in post.sends:
                kinds[delivery.kind] += delivery.vectors
        assert kinds == {"queries": 3 * 4, "keys": 3 * 4, "partial answers": 3 * 4}
    alone = Task(Dilated([16], [1]), Problem(1, 64, 64, 4, 0), layout, layout)
    assert [list(plan("ulysses", alone, rank).forward()) for rank in range(4)] == [[]] * 4


# --------------------------------------------------------------------------------- nothing can wait for ever


def play(posts_of_ranks):
    """Play the messages of all ranks. Every rank posts in order, and waits as its executor does at the latest:
    before the next post for what is due by then. A message is there when both sides have posted it; sends wait
    for their receives, as Gloo's and NCCL's do. Returns the ranks that never come to an end."""
    size = len(posts_of_ranks)
    at = [0] * size  # the next post of each rank
    sent, received = Counter(), Counter()  # by channel: how many were posted

    def is_done(rank, number):
        """Whether all messages of a post, and of those before it, were posted by their other side too."""
        out, into = Counter(), Counter()
        for post in posts_of_ranks[rank][: number + 1]:
            out.update(parcel.receiver for _, parcel in post.sends)
            into.update(parcel.sender for _, parcel in post.receives)
        return all(received[rank, peer] >= n for peer, n in out.items()) and all(
            sent[peer, rank] >= n for peer, n in into.items()
        )

    moved = True
    while moved:
        moved = False
        for rank in range(size):
            while at[rank] < len(posts_of_ranks[rank]):
                if at[rank] >= 1 and not is_done(rank, at[rank] - 1):
                    break
                for _, parcel in posts_of_ranks[rank][at[rank]].sends:
                    sent[rank, parcel.receiver] += 1
                for _, parcel in posts_of_ranks[rank][at[rank]].receives:
                    received[parcel.sender, rank] += 1
                at[rank] += 1
                moved = True
    return [
        rank
        for rank in range(size)
        if at[rank] < len(posts_of_ranks[rank]) or (at[rank] and not is_done(rank, at[rank] - 1))
    ]


@every_schedule
@both_phases
@settings(max_examples=25)
@given(data=st.data(), task=tasks())
def test_no_plan_waits_for_ever_even_if_every_post_is_waited_for_at_once(schedule, phase, task, data):
    """Stricter than any executor: one post at a time, as on one stream."""
    assert play(posts_of(task, schedule, phase, data.draw(nodes(task)))) == []


class Channelled:
    """The same game over channels, with counters instead of recounting: for many ranks."""

    def __init__(self, posts_of_ranks):
        self.posts = posts_of_ranks
        self.at = [0] * len(posts_of_ranks)
        self.sent, self.received = Counter(), Counter()
        self.open = [None] * len(posts_of_ranks)  # (channels sent on, channels received on) with their counts

    def play(self):
        waiting = list(range(len(self.posts)))
        while waiting:
            left = [rank for rank in waiting if not self.go_on(rank)]
            if left == waiting and not self.moved:
                return left
            self.moved = False
            waiting = left
        return []

    moved = False

    def go_on(self, rank):
        """As far as it can; whether it has come to its end."""
        while self.is_clear(rank):
            if self.at[rank] == len(self.posts[rank]):
                return True
            post = self.posts[rank][self.at[rank]]
            out, into = Counter(), Counter()
            for _, parcel in post.sends:
                self.sent[rank, parcel.receiver] += 1
                out[rank, parcel.receiver] = self.sent[rank, parcel.receiver]
            for _, parcel in post.receives:
                self.received[parcel.sender, rank] += 1
                into[parcel.sender, rank] = self.received[parcel.sender, rank]
            self.open[rank] = out, into
            self.at[rank] += 1
            self.moved = True
        return False

    def is_clear(self, rank):
        if self.open[rank] is None:
            return True
        out, into = self.open[rank]
        if all(self.received[c] >= n for c, n in out.items()) and all(self.sent[c] >= n for c, n in into.items()):
            self.open[rank] = None
            return True
        return False


@every_schedule
def test_no_schedule_of_1_to_64_ranks_can_deadlock(schedule):
    for ranks in range(1, 65):
        check_no_deadlock(schedule, Dense(), "zigzag", ranks, middle(divisors(ranks)))


@every_schedule
@pytest.mark.parametrize(
    ("pattern", "layout"),
    [
        (Dense(), "contiguous"),
        (Dense(causal=False), "striped"),
        (Dense(window=(9, 0)), "contiguous"),
        (Dilated([16, 64], [1, 4]), "contiguous"),
    ],
    ids=["contiguous", "striped", "window", "dilated"],
)
def test_no_pattern_can_deadlock(schedule, pattern, layout):
    for ranks in (2, 3, 4, 6, 7, 12, 16):
        for node_ranks in divisors(ranks) if schedule in ("hybrid", "double_ring") else [ranks]:
            check_no_deadlock(schedule, pattern, layout, ranks, node_ranks)


def middle(values):
    return values[len(values) // 2]


def check_no_deadlock(schedule, pattern, layout, ranks, node_ranks):
    """A forward posts what a backward posts, without its gradients."""
    dealt = deal(layout, 197, ranks)
    task = Task(pattern, Problem(1, 197, 197, 2, 0), dealt, dealt, 6)
    assert Channelled(posts_of(task, schedule, "backward", node_ranks)).play() == []
    if ranks <= 16:
        assert Channelled(posts_of(task, schedule, "forward", node_ranks)).play() == []


def test_the_game_finds_a_deadlock():
    """Two ranks that each wait for the other's second message before they send their own."""
    from longring.geometry.itinerary import Post
    from longring.geometry.parcels import Parcel

    def letter(sender, receiver):
        return (0, Parcel(sender, receiver, sender, ()))

    crossed = [
        [Post((), (letter(1, 0),), 1), Post((letter(0, 1),), (), 1)],
        [Post((), (letter(0, 1),), 1), Post((letter(1, 0),), (), 1)],
    ]
    assert play(crossed) == [0, 1]
    assert Channelled(crossed).play() == [0, 1]


# --------------------------------------------------------------------------------- schedules post what is planned


class Recorder:
    """A transport that delivers nothing and notes who was to be sent how many bytes, post by post."""

    def __init__(self, rank, size, node_ranks):
        self.rank, self.size, self.node_ranks = rank, size, node_ranks
        self.posts, self.timeouts = [], set()

    def converse(self, terms, *, timeout=None):
        self.timeouts.add(timeout)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def post(self, sends, receives, *, what):
        for _, x in receives:
            x.zero_()
        self.posts.append((per_peer(sends), per_peer(receives)))
        return self

    def wait(self):
        pass


def per_peer(messages):
    found = Counter()
    for peer, x in messages:
        found[peer] += x.nbytes
    return found


def planned(post, d, itemsize):
    sends, receives = Counter(), Counter()
    for _, parcel in post.sends:
        sends[parcel.receiver] += parcel.vectors * BYTES[parcel.kind](d, itemsize, max(4, itemsize))
    for _, parcel in post.receives:
        receives[parcel.sender] += parcel.vectors * BYTES[parcel.kind](d, itemsize, max(4, itemsize))
    return sends, receives


@every_schedule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "task",
    [
        Task(Dense(), Problem(1, 11, 11, 2, 0), *[deal("zigzag", 11, 4)] * 2, 4),
        Task(Dense(window=(3, 0)), Problem(2, 13, 13, 1, 0), *[deal("contiguous", 13, 6)] * 2, 3),
        Task(Dilated([8, 16], [1, 3]), Problem(1, 30, 30, 3, 0), *[deal("striped", 30, 4)] * 2),
        Task(Dilated([8, 32], [1, 4]), Problem(1, 32, 32, 4, 0), *[deal("contiguous", 32, 4)] * 2),
        Task(Dense(), Problem(1, 2, 2, 1, 0), *[deal("contiguous", 2, 4)] * 2),  # ranks that hold nothing
    ],
    ids=["zigzag", "window", "dilated", "near and far", "empty ranks"],
)
def test_schedules_post_what_is_planned_in_the_planned_order(schedule, task, dtype):
    problem, d, node_ranks = task.problem, 4, 2
    for rank in range(task.ranks):
        q = torch.zeros(problem.batch, task.queries.sizes[rank], task.heads, d, dtype=dtype)
        k = torch.zeros(problem.batch, task.keys.sizes[rank], problem.kv_heads, d, dtype=dtype)
        lse = torch.zeros(
            problem.batch, task.heads, q.shape[1], dtype=max(dtype, torch.float32, key=lambda t: t.itemsize)
        )
        for phase in ("forward", "backward"):
            recorder = Recorder(rank, task.ranks, node_ranks)
            made = plan(schedule, task, rank, node_ranks)
            journey = Journey(task, made, recorder, ReferenceKernel(), schedule, 1.0, 7.5)
            if phase == "forward":
                SCHEDULES[schedule].forward(journey, q, k, k)
            else:
                SCHEDULES[schedule].backward(journey, Upstream(q, None, q, lse), q, k, k)
            assert recorder.timeouts == {7.5}
            want = [planned(post, d, dtype.itemsize) for post in getattr(made, phase)()]
            got = [post for post in recorder.posts if any(post)]
            assert got == want


# --------------------------------------------------------------------------------------- what planning costs


@pytest.fixture
def counted(monkeypatch):
    """How often tiles were cut and rows looked for: planning takes as long as that."""
    counts = Counter()

    def counting(module, name):
        original = getattr(module, name)

        def call(*args):
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(module, name, call)

    counting(tasks_module, "cut_tiles")
    counting(itinerary, "rows_seen")
    return counts


def long_task(name, length, pattern=None):
    """Of a length no other test has, so that nothing of it is known already."""
    layout = deal(name, length, 4096)
    return Task(pattern or Dense(), Problem(1, layout.length, layout.length, 8, 0), layout, layout)


def test_a_dense_plan_of_one_rank_of_4096_is_cut_a_few_times(counted):
    steps = list(ring(long_task("zigzag", 1_000_001), 1234))
    assert len(steps) == 4096
    assert counted["cut_tiles"] < 100
    assert counted["rows_seen"] < 20 * 4096


def test_all_4096_ranks_have_a_plan_before_any_step_is_made(counted):
    task = long_task("zigzag", 1_000_002)
    for rank in range(task.ranks):
        ring(task, rank)
    assert counted["cut_tiles"] == 0
    assert counted["rows_seen"] < 1000  # to find the way round on which less travels


def test_a_longnet_plan_cuts_its_own_tiles_alone(counted):
    segments = [2048 << i for i in range(5)]
    pattern = Dilated(segments, [segment // 2048 for segment in segments])
    layout = deal("contiguous", (1 << 20) - 1, 64)
    list(exchange(Task(pattern, Problem(1, layout.length, layout.length, 32, 0), layout, layout), 33).forward())
    assert counted["cut_tiles"] <= 2 * 64


def test_tasks_over_equal_values_are_one_task():
    """Plans are cached by value: a new call with the same numbers finds the old plan."""
    layout = from_ranges([[range(5)], [range(5, 10)]])
    one, other = (
        Task(Dense(), Problem(1, 10, 10, 1, 0), dealt, dealt) for dealt in (layout, deal("contiguous", 10, 2))
    )
    assert one == other
    assert hash(one) == hash(other)
    assert ring(one, 0) is ring(other, 0)
