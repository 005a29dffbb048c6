"""DistributedDataParallel over rings: the losses, and the weights, of one process."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from training_runs import CONFIG, STEPS, Place, Run, check, made, optimiser_of, trained, whole_parameters

import longring as lr

pytestmark = pytest.mark.processes


def run(place, dtype=torch.float64, batches_a_step=1, autocast=False, **options):
    model = DistributedDataParallel(made(dtype, **options))
    losses = trained(
        place,
        model,
        optimiser_of(model),
        batches_a_step=batches_a_step,
        autocast=autocast,
        not_yet=lambda is_last: nullcontext() if is_last else model.no_sync(),
    )
    return Run(losses, whole_parameters(model))


def conversations(place, **options):
    """How often this rank's ring came together in a run."""
    before = place.sharding.transport._conversations
    run(place, **options)
    return place.sharding.transport._conversations - before


def every_run():
    torch.set_num_threads(1)
    two_by_two = Place.on_a_mesh()
    kept, recomputed = conversations(two_by_two), conversations(two_by_two, checkpoint_activations=True)
    return recomputed - kept, {
        "zigzag": run(two_by_two),
        "contiguous": run(Place.on_a_mesh(layout="contiguous")),
        "ulysses": run(two_by_two, schedule="ulysses"),
        "accumulated": run(two_by_two, batches_a_step=2),
        "checkpointed": run(two_by_two, checkpoint_activations=True),
        "autocast": run(two_by_two, torch.float32, autocast=True, checkpoint_activations=True),
        "three tokens on four ranks": run(Place.on_a_mesh(1, 4, length=3)),
    }


def test_every_rank_has_the_run_of_one_process():
    for repeated, runs in lr.launch(every_run, ranks=4, timeout=110):
        # each forward once; that the order is the same on all ranks is what they agree on each time, or raise
        assert repeated == STEPS * CONFIG.layers
        check(runs.pop("accumulated"), torch.float64, batches_a_step=2)
        check(runs.pop("autocast"), torch.float32, autocast=True)
        check(runs.pop("three tokens on four ranks"), torch.float64, length=3)
        assert len(runs) == 4
        for found in runs.values():
            check(found, torch.float64)


def by_accelerate():
    from accelerate import Accelerator

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    accelerator, place = Accelerator(cpu=True), Place.on_a_mesh()
    model = made(torch.float64)
    model, optimiser = accelerator.prepare(model, optimiser_of(model))
    return Run(trained(place, model, optimiser), whole_parameters(model))


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_what_accelerate_prepares():
    for found in lr.launch(by_accelerate, ranks=4, timeout=110):
        check(found, torch.float64)
