"""Processes are killed while they save. Whatever the moment, the newest complete checkpoint is whole, bit for bit."""

from __future__ import annotations

import random
import shutil

import pytest
from checkpoint_programs import loaded

from longring.train import checkpoints
from worlds import World, results

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("is_damaged", [True, False])
def test_killed_at_every_moment_of_a_save(is_damaged, tmp_path):
    """Of the step that is saved there is a damaged checkpoint, to be replaced, or a good one, and no other."""
    found = results(1, "checkpoint_programs:killed_at_every_moment", str(tmp_path), is_damaged, limit=100.0)[0]
    assert len(found) > 30
    assert found[0] == (2 if is_damaged else 3)
    assert found[-1] == 3
    assert found == sorted(found)  # once the new one is there, no moment takes it away


def killed(folder, size, victim, moment, everybody):
    """What was found before and after a world that was killed; the survivors' errors are asserted."""
    before = checkpoints.find(folder).step if folder.exists() and checkpoints.find(folder) else 0
    args = (str(folder), victim, moment, everybody)
    outcomes = World(size, "checkpoint_programs:killed_while_saving", args, ends="at once").run(limit=40)
    case = f"rank {victim} of {size} at moment {moment}, everybody {everybody}"
    for rank, outcome in enumerate(outcomes):
        if rank == victim or everybody:
            assert outcome.status == -9, f"{case}: {outcome.error} {outcome.text} {outcome.value}\n{outcome.printed}"
        else:
            assert outcome.status == 0, f"{case}: hung or died\n{outcome.printed}"
            assert outcome.value, f"{case}: {outcome.error}: {outcome.text}\n{outcome.printed}"
            assert outcome.value.startswith(f"PeerLost: rank {rank}"), f"{case}: {outcome.value}"
    after = loaded(folder) if checkpoints.find(folder) else 0
    assert after >= before, case
    shutil.rmtree(folder.parent / f"{folder.name}.pids", ignore_errors=True)
    return before, after


@pytest.mark.parametrize(
    ("seed", "cases"), [pytest.param(0, 5), pytest.param(1, 40, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_killed_ranks_lose_only_what_they_were_saving(seed, cases, tmp_path):
    """One run, started again and again by other numbers of ranks, of which one or all are killed."""
    chance, folder, progress = random.Random(seed), tmp_path / "run", 0
    for _ in range(cases):
        size = chance.choice([1, 2, 3, 4])
        before, after = killed(
            folder, size, chance.randrange(size), chance.randint(1, 60), chance.random() < 0.5 or size == 1
        )
        progress += after - before
    assert progress > 0
    left = [path.name for path in folder.iterdir() if "saving" in path.name or "deleting" in path.name]
    assert len(left) <= 2  # of the last one killed: what others left was removed
