"""DeepSpeed's ZeRO over rings: the losses, and the weights, of one process, for every stage and over its own groups."""

from __future__ import annotations

import logging
import warnings
from importlib.util import find_spec

import pytest
import torch
from training_runs import CONTEXT, DATA, LENGTH, STEPS, Place, Run, check, made, optimiser_of

import longring as lr
from longring.integrations.deepspeed import backward

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,  # SGD
}


def deepspeed_of_torch():
    """Without its own all-reduce of the CPU, which it would compile first, for a minute or two."""
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def run(place, stage, *, batches_a_step=1, clip=0.0, options=None, zero=None, **words):
    deepspeed = deepspeed_of_torch()
    model = made(torch.float32, **(options or {}))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})}
    config = {**CONFIG, "zero_optimization": zero, "gradient_accumulation_steps": batches_a_step}
    config["gradient_clipping"] = clip  # left out, it is 1
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimiser_of(model), config=config, **words)
    losses = []
    for number in range(STEPS * batches_a_step):
        loss = place.loss(engine, number)
        backward(engine, loss, group=place.mesh)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        return Run(losses, {name: value.detach().clone() for name, value in model.named_parameters()})


def every_run():
    torch.set_num_threads(1)
    place = Place.on_a_mesh()
    found = {f"ZeRO {stage}": run(place, stage) for stage in (0, 1, 2, 3)}
    found["clipped"] = run(place, 2, clip=0.25)
    found["accumulated"] = run(place, 2, batches_a_step=2)
    found["ZeRO 3, checkpointed"] = run(place, 3, options={"checkpoint_activations": True})
    with pytest.raises(lr.ArgumentError, match=r"reduces gradients over \[., .\] alone, without \[., .\]"):
        run(place, 1, mesh_param=(DATA, CONTEXT))
    return found


def test_every_rank_has_the_run_of_one_process():
    for runs in lr.launch(every_run, ranks=4, timeout=110):
        check(runs.pop("clipped"), torch.float32, clip=0.25)
        check(runs.pop("accumulated"), torch.float32, batches_a_step=2)
        assert len(runs) == 5
        for found in runs.values():
            check(found, torch.float32)


def over_groups_of_its_own():
    """A ring over the group that DeepSpeed made for sequence parallelism, over which it sums gradients, or averages."""
    torch.set_num_threads(1)
    deepspeed_of_torch().init_distributed("gloo")
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as groups

    groups.initialize_sequence_parallel(CONTEXT)
    place = Place(Place.on_a_mesh().mesh, lr.Sharding(LENGTH, groups.get_sequence_parallel_group()))
    found = [run(place, stage, mpu=groups) for stage in (0, 1, 2, 3)]
    with pytest.raises(lr.ArgumentError, match="sums some gradients over sequence parallel ranks and averages others"):
        run(place, 3, mpu=groups, zero={"reduce_scatter": False})
    return found, run(place, 3, mpu=groups, clip=0.25)


def test_its_sequence_parallel_group_is_a_ring():
    for runs, clipped in lr.launch(over_groups_of_its_own, ranks=4, timeout=110):
        for found in runs:
            check(found, torch.float32)
        check(clipped, torch.float32, clip=0.25)


def test_a_group_that_is_none():
    with pytest.raises(lr.ArgumentError, match="group must be a torch ProcessGroup or a DeviceMesh, got 'nccl'"):
        backward(None, torch.ones(()), group="nccl")
