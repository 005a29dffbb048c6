"""Over NCCL as over Gloo: who is lost is named by all others in time, and who makes another call by all."""

import pytest

import shared_gpu
from losing import TIMEOUT, WORDS, disagreements, losses, raised_after
from worlds import World

STARTING = 90.0


def lost(size, victim, post, how, *more, **words):
    """The ranks that survivors named; when each raised is printed for the record, and asserted."""
    world = shared_gpu.world(size)
    named, outcomes = losses(size, victim, post, how, *more, starting=STARTING, **words, **world)
    seconds = ", ".join(f"{each:.2f}" for each in raised_after(outcomes, victim))
    print(f"{how} rank {victim} of {size} at post {post} {more}: raised after {seconds} s")  # noqa: T201
    return named


@pytest.mark.parametrize(
    ("size", "victim", "post", "how"),
    [
        (2, 1, 1, "kill"),
        (4, 0, 4, "kill"),  # hosts the store
        (4, 2, 8, "kill"),
        (2, 0, 1, "stop"),
        (4, 3, 5, "stop"),
        (3, 1, 4, "leave"),
    ],
)
def test_a_lost_rank_is_named_by_all_others(size, victim, post, how):
    assert lost(size, victim, post, how) == [victim] * (size - 1)


@pytest.mark.parametrize(
    ("size", "victim", "post", "how", "schedule", "moment"),
    [
        (2, 1, 2, "kill", "ring", "after"),
        (3, 2, 4, "kill", "ring", "before"),
        (4, 1, 7, "kill", "exchange", "after"),
        (3, 1, 3, "kill", "gather", "before"),
        (3, 1, 3, "stop", "ring", "after"),
        (3, 2, 4, "leave", "ring", "before"),
    ],
)
def test_attention_loses_a_rank(size, victim, post, how, schedule, moment):
    words = {"program": "attention_with_a_victim", "calls": 2}
    assert lost(size, victim, post, how, schedule, moment, **words) == [victim] * (size - 1)


def test_survivors_can_destroy_the_group():
    assert lost(3, 1, 3, "kill", program="then_destroy_the_group") == [1, 1]


@pytest.mark.parametrize("good", [0, 2], ids=["cold", "warm"])
@pytest.mark.parametrize("kind", WORDS)
def test_one_rank_differs(kind, good):
    seconds = disagreements(kind, good, limit=STARTING, **shared_gpu.world(3))
    print(f"{kind} differs: raised after {', '.join(f'{each:.2f}' for each in seconds)} s")  # noqa: T201


def test_ranks_that_all_is_well_with_end_by_themselves():
    world = World(3, "programs:on_nccl", ("ring", 3), **shared_gpu.world(3))
    for outcome in world.run(TIMEOUT + STARTING):
        assert (outcome.error, outcome.status) == (None, 0), outcome.printed
