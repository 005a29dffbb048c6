"""Training is killed, again and again: whatever the moment, it ends with the losses of a run that nobody killed."""

from __future__ import annotations

import os
import random

import pytest
from kill_programs import STARTING, Kill, begun, damaged, last_step, newest_whole, start
from training_curves import losses, write_corpus

from longring.train.checkpoints.claims import claim, release

pytestmark = pytest.mark.processes

SAVE_EVERY, KEEP = 3, 3
WORDS = {"save_every": SAVE_EVERY, "keep": KEEP, "timeout": 30.0, "batch": 1, "context_ranks": None}
WORDS["restart_if_damaged"] = True  # which is what happens when the only one that was saved is damaged
STEPS_A_KILL = 12  # at most, and one save more: so that no run is over before it is killed
EXACT = 1e-9  # between float64 runs on other ranks, as in test_train_curves: far below what float32 would be allowed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(write_corpus(tmp_path_factory.mktemp("corpus") / "text"))


def drawn(chance: random.Random, number: int, size: int) -> Kill:
    """By turns from outside, one rank and all of them, and right before a change on the disk, one and all."""
    ranks = chance.sample(range(size), size)
    if number % 2 == 0:
        ranks = ranks[:1]
    if number % 4 >= 2:
        # the first rank puts checkpoints in place and deletes old ones, the others write their files
        return Kill(tuple(ranks), moment=chance.randint(1, 90 if ranks[0] == 0 else 25))
    least = STARTING if len(ranks) == size else 0  # who has not met the others yet is waited for, as long as it takes
    return Kill(tuple(ranks), steps=chance.randint(least, 8), delay=chance.random() * 0.04)


def check_ends(outcomes, kill, case) -> None:
    """The first that is killed is dead, who lived on heard of it, and nobody hangs or takes it for something else."""
    for rank, outcome in enumerate(outcomes):
        seen = f"{case}: rank {rank} ended with {outcome.status}, {outcome.error}: {outcome.text}\n{outcome.printed}"
        is_dead, has_heard = outcome.status == -9, (outcome.status, outcome.error) == (0, "PeerLost")
        if rank == kill.ranks[0]:
            assert is_dead, seen
        elif rank in kill.ranks:
            assert is_dead or has_heard, seen  # it may have heard of the first before its own turn came
        else:
            assert has_heard, seen


def killed(out, size, words, kill, case) -> None:
    """One start that is killed: it went on from the newest whole checkpoint, and lost what came after the last."""
    expected, before = newest_whole(out), len(begun(out))
    check_ends(start(size, out, words, kill), kill, case)
    went_on = begun(out)[before:]
    if not went_on:  # it was killed before it had begun
        assert newest_whole(out) == expected, case
        return
    assert went_on == [expected], case
    last = max(last_step(out), expected)
    due = max(expected, (last - 1) // SAVE_EVERY * SAVE_EVERY)  # the save of the last step itself may have been cut off
    assert due <= newest_whole(out) <= last, case


@pytest.mark.parametrize(
    ("seed", "kills", "sizes", "dtype"),
    [
        pytest.param(0, 4, (2,), "fp32", id="four"),
        pytest.param(1, 20, (2,), "fp32", id="twenty", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(
            2, 20, (1, 2, 3, 4), "fp64", id="twenty-other-ranks", marks=[pytest.mark.slow, pytest.mark.timeout(900)]
        ),
    ],
)
def test_a_run_that_is_killed_has_the_losses_of_one_that_is_not(corpus, tmp_path, seed, kills, sizes, dtype):
    """On the same ranks to the bit. Now and then the newest checkpoint is damaged, too."""
    chance, out = random.Random(seed), tmp_path / "killed"
    words = {**WORDS, "data": corpus, "dtype": dtype, "steps": STEPS_A_KILL * kills}
    unfinished = 0
    for number in range(kills):
        size = chance.choice(sizes)
        kill = drawn(chance, number, size)
        case = f"seed {seed}, kill {number} of {size} ranks: {kill}"
        killed(out, size, words, kill, case)
        unfinished += any(out.glob("*.saving-*"))
        if number % 4 == 3 and newest_whole(out):
            damaged(out / f"step-{newest_whole(out):08}", chance)
    assert newest_whole(out) > 0, "or it was killed too early to show anything"
    assert unfinished, "no checkpoint was being written"
    last = chance.choice(sizes)
    assert {outcome.value[0] for outcome in start(last, out, words)} == {words["steps"]}
    check_left(out)

    whole = tmp_path / "whole"
    assert {outcome.value[1] for outcome in start(sizes[0], whole, words)} == {None}
    if sizes == (2,):
        assert losses(out) == losses(whole)
    assert len(losses(out)) == words["steps"]
    assert max(abs(a - b) for a, b in zip(losses(out), losses(whole), strict=True)) < EXACT


def check_left(out) -> None:
    """What a run leaves: nothing half-written, nothing of those who were killed."""
    names = sorted(path.name for path in out.iterdir() if path.name != "tensorboard")
    assert [name for name in names if not name.startswith("step-")] == ["config.json", "lock", "metrics.jsonl"]
    assert all(len(name) == len("step-00000001") for name in names if name.startswith("step-")), names
    assert len(names) == 3 + KEEP


def test_damaged_checkpoints_are_named_and_passed_over(corpus, tmp_path):
    """One is cut short, one has a byte changed; the run goes on from the one before, and loses nothing for good."""
    words = {**WORDS, "data": corpus, "dtype": "fp32", "steps": 3 * SAVE_EVERY}
    start(2, tmp_path, words)
    whole = losses(tmp_path)
    newest, second = (tmp_path / f"step-{step:08}" for step in (3 * SAVE_EVERY, 2 * SAVE_EVERY))
    cut, changed = newest / "__0_0.distcp", second / "__1_0.distcp"
    size = cut.stat().st_size
    cut.write_bytes(cut.read_bytes()[: size // 2])
    content = bytearray(changed.read_bytes())
    content[len(content) // 2] ^= 1
    changed.write_bytes(content)
    assert newest_whole(tmp_path) == SAVE_EVERY
    for outcome in start(2, tmp_path, words):
        steps, resumed_from, notes = outcome.value
        assert (steps, resumed_from) == (3 * SAVE_EVERY, SAVE_EVERY)
        assert notes[:2] == [
            f"skipped {newest.name}: {cut.name} has {size // 2} bytes, and was written with {size}",
            f"skipped {second.name}: {changed.name} was changed since it was written: its checksum differs",
        ]
    assert losses(tmp_path) == whole
    assert newest_whole(tmp_path) == 3 * SAVE_EVERY


def test_a_second_start_is_refused_while_the_first_lives(corpus, tmp_path):
    """Before it touches anything: it would have put the first one's metrics out of its reach."""
    words = {**WORDS, "data": corpus, "dtype": "fp32", "steps": 2 * SAVE_EVERY}
    claim(tmp_path)  # as the first rank of the first start has
    for rank, outcome in enumerate(start(2, tmp_path, words)):
        assert outcome.error == "CheckpointError", f"rank {rank}: {outcome.text}\n{outcome.printed}"
        assert f"another run saves into {tmp_path}: process {os.getpid()} on" in outcome.text
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    release(tmp_path)
    assert {outcome.value[0] for outcome in start(2, tmp_path, words)} == {2 * SAVE_EVERY}
