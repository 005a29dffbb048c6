"""Gradients of others in a replay: how they are made up, and that whoever treats them wrongly is found."""

from itertools import pairwise

import pytest
import torch

import longring as lr
from longring.bench.replay import checks, run
from longring.bench.replay.gradients import is_loud
from longring.bench.replay.places import own_queries, vector_of
from longring.bench.replay.run import Setting, make, replay
from longring.bench.replay.sampling import sampled_own, sampled_sent
from longring.schedules import gather, relay

CPU = torch.device("cpu")
CAUSAL = lr.Dense()
DILATED = lr.Dilated([16, 64, 256], [1, 4, 16])
FOLLOWED = [
    (CAUSAL, "ring", "zigzag"),
    (CAUSAL, "bidirectional", "zigzag"),
    (CAUSAL, "double_ring", "striped"),
    (CAUSAL, "gather", "zigzag"),
    (lr.Dense(window=(100, 0)), "exchange", "contiguous"),
    (DILATED, "exchange", "contiguous"),
    (DILATED, "ring", "contiguous"),
]
OTHERS = {"dk, rows of others", "dv, rows of others"}
HOME = {"dk, with what came home", "dv, with what came home"}
OWN = {"dk, own rows", "dv, own rows"}
PASSED_ON = {"dk, only passed on", "dv, only passed on"}


def setting(pattern=CAUSAL, **changes):
    usual = {"tokens": 640, "ranks": 16, "rank": 10, "heads": 4, "kv_heads": 2, "head_dim": 16}
    usual |= {"dtype": torch.bfloat16, "device": CPU, "node_ranks": 4, "seed": 1}
    return Setting(**{**usual, "pattern": pattern, **changes})


def wrong(pattern=CAUSAL, samples=24, **changes):
    return {check.quantity for check in replay(setting(pattern, **changes), samples=samples).checks if not check.ok}


# ---------------------------------------------------------------------------------------------- how they are made


@pytest.mark.parametrize(("pattern", "schedule", "layout"), FOLLOWED)
def test_what_is_drawn_is_what_is_expected(pattern, schedule, layout):
    """Every vector of every parcel, to the bit; zero only where it comes home to a row that is left alone."""
    made = make(setting(pattern, schedule=schedule, layout=layout, tokens=300, ranks=8, rank=5, batch=2))
    _, arriving = run._gradients(made)
    assert {parcel.owner == 5 for parcel in arriving} == (
        {True} if schedule in ("exchange", "gather") else {True, False}
    )
    for parcel in arriving:
        vectors = [vector_of(made.task, parcel, number) for number in range(parcel.vectors)]
        expected = made.gradients.brought([parcel], vectors)
        for kind in ("dk", "dv"):
            flat = torch.full((parcel.vectors * 16,), torch.nan)
            made.gradients.draw(parcel, kind, flat)
            drawn = flat.view(-1, 16)
            assert torch.equal(drawn.double(), expected[kind])
            has_any = [parcel.owner != 5 or is_loud(key.position) for key in vectors]
            assert drawn.any(-1).tolist() == has_any


def test_several_parcels_for_one_row_add_up():
    made = make(setting(schedule="gather", tokens=64, ranks=8, rank=5))
    _, arriving = run._gradients(made)
    key = next(
        vector_of(made.task, arriving[0], n) for n in range(9) if is_loud(vector_of(made.task, arriving[0], n)[1])
    )
    whole = made.gradients.brought(arriving, [key])["dv"]
    each = [made.gradients.brought([parcel], [key])["dv"] for parcel in arriving]
    assert len(each) == 7
    torch.testing.assert_close(whole, sum(each))
    assert len({tuple(one.flatten().tolist()) for one in each}) == 7


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 16, 1024, 4096, 2**20])
def test_about_every_second_row_is_left_alone(stride):
    loud = [is_loud(i * stride) for i in range(1000)]
    assert 400 < sum(loud) < 600
    assert sum(a != b for a, b in pairwise(loud)) > 100


@pytest.mark.parametrize(("pattern", "schedule", "layout"), FOLLOWED)
def test_they_are_about_as_large_as_the_ranks_own(pattern, schedule, layout, monkeypatch):
    """Within a factor of 8 of each other, for nine of ten rows that have both."""
    kept = []
    monkeypatch.setattr(
        checks, "contributions", lambda *args, honest=checks.contributions: kept.append(found := honest(*args)) or found
    )
    brought = []
    honest = checks.Judge._keys

    def noting(self, whose, keys, *args, **more):
        brought.extend(one.came for one in keys)
        return honest(self, whose, keys, *args, **more)

    monkeypatch.setattr(checks.Judge, "_keys", noting)
    assert replay(setting(pattern, schedule=schedule, layout=layout), samples=24).ok
    ratios = [
        float(came[kind].norm() / own[kind].size)
        for own, came in zip(kept, brought, strict=True)
        for kind in ("dk", "dv")
        if came[kind].any() and own[kind].size > 0
    ]
    assert len(ratios) >= 4
    assert sum(1 / 8 < ratio < 8 * 15**0.5 for ratio in ratios) >= 0.9 * len(ratios)
    assert min(ratios) > 1 / 30  # forgotten, even that one would be far beyond a budget of 1 %


def test_both_kinds_of_rows_are_sampled():
    made = make(setting(DILATED, schedule="ring"))
    leaving, arriving = run._gradients(made)
    own = sampled_own(made.task, 10, made.gradients, arriving, 10, 0)
    alone = [key for key in own if not is_loud(key.position)]
    assert len(alone) >= 10
    assert len(own) - len(alone) >= 8
    every = [(parcel, number) for parcel in leaving for number in range(parcel.vectors)]
    keys = [vector_of(made.task, *every[number]) for number in sampled_sent(made.task, 10, leaving, 10, 0)]
    added_to = [bool(own_queries(made.task, 10, key.position, key.kv_head)) for key in keys]
    assert sum(added_to) >= 4
    assert len(added_to) - sum(added_to) >= 10


# ------------------------------------------------------------------------------------------ faults it must find


def shifted(flat, heads=2):
    """Each row in the place of the next."""
    flat.copy_(flat.view(-1, heads * 16).roll(1, 0).view(-1))


@pytest.mark.parametrize("fault", ["forgotten", "doubled", "shifted", "its own lost"])
@pytest.mark.parametrize(("pattern", "schedule"), [(CAUSAL, "ring"), (CAUSAL, "bidirectional"), (DILATED, "ring")])
def test_what_came_behind_a_visitor(fault, pattern, schedule, monkeypatch):
    honest = relay.Found.add

    def faulty(self, parcel, brought):
        if fault == "forgotten":
            return
        if fault == "its own lost":
            for mine in (self.dk, self.dv):
                mine.in_place().zero_()
        if fault == "shifted":
            for loan in brought:
                shifted(loan.flat)
        if fault == "doubled":
            for loan in brought:
                loan.flat.mul_(2)
        honest(self, parcel, brought)

    monkeypatch.setattr(relay.Found, "add", faulty)
    found = wrong(pattern, schedule=schedule)
    assert found >= OTHERS
    assert found <= OTHERS | PASSED_ON
    if pattern == DILATED and fault != "its own lost":
        assert found >= PASSED_ON


def test_what_is_only_to_be_passed_on(monkeypatch):
    """Where the rank itself finds nothing, what came must go on as it is."""
    honest = relay.Found.add

    def faulty(self, parcel, brought):
        seen = [mine.in_place().any(-1, keepdim=True) for mine in (self.dk, self.dv)]
        honest(self, parcel, brought)
        for mine, some in zip((self.dk, self.dv), seen, strict=True):
            mine.in_place().mul_(torch.where(some, 1.0, 1 + 2**-20))

    monkeypatch.setattr(relay.Found, "add", faulty)
    assert wrong(DILATED, schedule="ring") == PASSED_ON


@pytest.mark.parametrize("fault", ["forgotten", "doubled", "shifted"])
@pytest.mark.parametrize(("pattern", "schedule", "layout"), [one for one in FOLLOWED if one[1] != "gather"])
def test_what_came_home(fault, pattern, schedule, layout, monkeypatch):
    honest = relay.Own.add

    def faulty(self, parcel, brought):
        if fault == "shifted":
            for flat in brought:
                shifted(flat, heads=len(parcel.shares[0].kv_heads))
        for _ in range({"forgotten": 0, "doubled": 2, "shifted": 1}[fault]):
            honest(self, parcel, brought)

    monkeypatch.setattr(relay.Own, "add", faulty)
    found = wrong(pattern, schedule=schedule, layout=layout)
    assert found >= HOME
    assert found <= HOME | OWN
    if fault != "shifted":
        assert found == HOME


@pytest.mark.parametrize("fault", ["forgotten", "doubled", "shifted"])
def test_what_came_home_in_a_gather(fault, monkeypatch):
    """One of 15 parts is enough."""
    honest, calls = gather._add, []

    def faulty(own, brought, doing):
        calls.append(doing)
        times = 1
        if len(calls) == 9:
            times = {"forgotten": 0, "doubled": 2, "shifted": 1}[fault]
            if fault == "shifted":
                brought = [x.roll(1, 1) for x in brought]
        for _ in range(times):
            honest(own, brought, doing)

    monkeypatch.setattr(gather, "_add", faulty)
    found = wrong(schedule="gather")
    assert found >= HOME
    assert found <= HOME | OWN


def test_one_home_coming_that_is_forgotten_among_many(monkeypatch):
    honest, calls = relay.Own.add, []

    def faulty(self, parcel, brought):
        calls.append(parcel)
        if len(calls) != 5:
            honest(self, parcel, brought)

    monkeypatch.setattr(relay.Own, "add", faulty)
    assert wrong(lr.Dense(causal=False), schedule="exchange", layout="contiguous") == HOME
    assert len(calls) == 15
