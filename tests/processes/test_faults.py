"""A rank is killed, stopped, leaves, or fails, at any step: every other raises within the timeout and half a second,
names it, and ends by itself.
"""

import random

import pytest

from losing import PROMISED, STARTING, TIMEOUT, held_up, losses, raised_after
from worlds import World

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("size", "victim", "post", "how"),
    [
        (2, 1, 1, "kill"),
        (2, 0, 2, "kill"),  # hosts the store
        (3, 0, 5, "kill"),
        (4, 0, 4, "kill"),
        (4, 2, 8, "kill"),
        (2, 0, 1, "stop"),
        (3, 0, 4, "stop"),
        (4, 3, 5, "stop"),
        (4, 0, 5, "leave"),
        (8, 0, 9, "stop"),
        (8, 5, 10, "stop"),
    ],
)
def test_a_lost_rank_is_named_by_all_others(size, victim, post, how):
    named, _ = losses(size, victim, post, how)
    assert named == [victim] * (size - 1)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("timeout", [2.0, 6.0])
def test_a_timeout_of_any_length_is_kept(timeout, victim):
    named, outcomes = losses(4, victim, 5, "stop", timeout=timeout)
    assert named == [victim] * 3 or held_up(outcomes) > timeout / 2  # then others, too, gave no sign of life


@pytest.mark.parametrize("victim", [0, 1])
def test_the_timeout_of_the_group_is_kept_where_a_call_has_none(victim):
    named, _ = losses(3, victim, 4, "stop", program="victim_of_a_group_with_a_timeout")
    assert named == [victim] * 2


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_is_stopped_before_the_group_is_used(victim):
    named, _ = losses(3, victim, 1, "stop", program="lost_before_the_group_is_used")
    assert named == [victim] * 2


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_fails_tells_the_others_why(victim):
    named, outcomes = losses(4, victim, 4, "raise")
    assert named == [victim] * 3
    assert outcomes[victim].error == "MemoryError"
    for rank, outcome in enumerate(outcomes):
        assert rank == victim or f"rank {victim} failed: MemoryError: no room left" in outcome.text
    assert max(outcome.at for outcome in outcomes) - outcomes[victim].at < 3.0


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_survivors_can_destroy_the_group(how):
    named, _ = losses(3, 1, 3, how, program="then_destroy_the_group")
    assert named == [1, 1]


@pytest.mark.parametrize(("victim", "how"), [(0, "kill"), (2, "kill"), (1, "stop")])
def test_a_backend_without_tags_loses_a_rank(victim, how):
    named, _ = losses(3, victim, 4, how, program="companion_with_a_victim")
    assert named == [victim] * 2


@pytest.mark.parametrize(("size", "victim", "how"), [(2, 1, "kill"), (3, 0, "stop"), (4, 2, "stop")])
def test_a_rank_is_lost_while_the_others_are_held_up_by_their_devices(size, victim, how):
    """As by a kernel that CUDA loads when it is first launched: that waits for the message that never comes."""
    outcomes = World(size, "programs:lost_behind_a_cuda_call", (victim, how, TIMEOUT)).run(TIMEOUT + STARTING)
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    for outcome in survivors:
        assert (outcome.error, outcome.rank_named, outcome.status) == ("PeerLost", victim, 0), outcome
    assert max(raised_after(outcomes, victim)) < TIMEOUT + PROMISED + held_up(outcomes)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_nothing_waits_on_after_a_loss(how):
    outcomes = World(4, "programs:carriers_left", (2, 4, how, 1.0, 4), ends="at once").run()
    assert [outcomes[rank].value for rank in (0, 1, 3)] == [[], [], []]


def test_the_host_of_the_store_is_lost_before_anybody_was_greeted():
    named, _ = losses(4, 0, 1, "kill", program="lost_before_the_first_call")
    assert named == [0, 0, 0]


SCHEDULES = ["ring", "exchange", "gather"]


@pytest.mark.parametrize(
    ("size", "victim", "post", "how", "schedule", "moment"),
    [
        (2, 0, 2, "kill", "ring", "after"),
        (3, 2, 4, "kill", "ring", "before"),
        (4, 1, 7, "kill", "exchange", "after"),
        (3, 0, 3, "kill", "gather", "before"),
        (3, 1, 3, "stop", "ring", "after"),
    ],
)
def test_attention_loses_a_rank(size, victim, post, how, schedule, moment):
    named, outcomes = losses(size, victim, post, how, schedule, moment, program="attention_with_a_victim", calls=2)
    assert named == [victim] * (size - 1)
    phases = {outcome.phase_and_step.partition(",")[0] for outcome in outcomes if outcome.phase_and_step}
    assert phases <= {"forward", "backward"}


@pytest.mark.slow
@pytest.mark.parametrize(("how", "cases"), [("kill", 60), ("stop", 24)])
@pytest.mark.parametrize("program", ["ring_with_a_victim", "attention_with_a_victim"])
def test_losses_at_random_steps(program, how, cases):
    """Hangs, aborts, late and partial results are asserted away case by case; the share of right names is counted."""
    chance, right, asked = random.Random(f"{program} {how}"), 0, 0
    for _ in range(cases):
        size = chance.choice([2, 3, 4])
        victim, post = chance.randrange(size), chance.randint(1, 3 * (size - 1))
        more = [] if program == "ring_with_a_victim" else [chance.choice(SCHEDULES), chance.choice(["before", "after"])]
        store = chance.choice(["rank 0", "rank 0", "nobody"])
        named, _ = losses(size, victim, post, how, *more, program=program, store=store)
        right, asked = right + named.count(victim), asked + len(named)
    print(f"{program}, {how}: the lost rank was named by {right} of {asked} survivors in {cases} cases")  # noqa: T201
    assert right >= 0.95 * asked
