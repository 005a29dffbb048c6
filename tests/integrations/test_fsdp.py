"""FSDP2 over rings: the losses, and the weights, of one process, however parameters are dealt or recomputed."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from training_runs import CONTEXT, DATA, Place, Run, check, made, optimiser_of, trained, whole_parameters

import longring as lr
from longring.nn import DecoderLayer

pytestmark = pytest.mark.processes

HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def dealt(model, mesh, **options):
    """The parameters of each layer apart, and those around them."""
    for layer in model.stack.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def run(place, mesh, model=None, policy=None, **words):
    options = {} if policy is None else {"mp_policy": policy}
    model = dealt(made(torch.float64) if model is None else model, mesh, **options)

    @contextmanager
    def not_yet(is_last):
        model.set_requires_gradient_sync(is_last)
        yield

    losses = trained(place, model, optimiser_of(model), not_yet=not_yet, **words)
    return Run(losses, whole_parameters(model))


def run_of_its_predecessor(place, **words):
    model = FullyShardedDataParallel(made(torch.float32), use_orig_params=True, device_id=torch.device("cpu"), **words)
    losses = trained(place, model, optimiser_of(model))
    with FullyShardedDataParallel.summon_full_params(model):
        return Run(losses, whole_parameters(model))


def recomputed(**how):
    model = made(torch.float64)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, **how),
        check_fn=lambda module: isinstance(module, DecoderLayer),
    )
    return model


def every_run():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of what is deprecated
    place = Place.on_a_mesh()
    everywhere = dist.init_device_mesh("cpu", (DATA * CONTEXT,))
    with pytest.raises(lr.ArgumentError, match=r"angles are .*bfloat16"):  # which FSDP2 has rounded on their way
        run(place, everywhere, made(torch.float32), MixedPrecisionPolicy(**HALF))
    return {
        "over all ranks": run(place, everywhere),
        "within rings, replicated over data": run(place, place.mesh),
        "clipped": run(place, place.mesh, clip=0.25),
        "accumulated": run(place, everywhere, batches_a_step=2),
        "in 16 bits": run(
            place, everywhere, made(torch.float32), MixedPrecisionPolicy(**HALF, cast_forward_inputs=False)
        ),
        "FSDP1": run_of_its_predecessor(place),
        "FSDP1 in 16 bits": run_of_its_predecessor(place, mixed_precision=MixedPrecision(**HALF)),
        "checkpointed by the model": run(place, everywhere, made(torch.float64, checkpoint_activations=True)),
        "checkpointed from outside": run(place, everywhere, recomputed()),
        "checkpointed by reentering": run(place, everywhere, recomputed(checkpoint_impl=CheckpointImpl.REENTRANT)),
    }


def test_every_rank_has_the_run_of_one_process():
    for runs in lr.launch(every_run, ranks=4, timeout=110):
        check(runs.pop("clipped"), torch.float64, clip=0.25)
        for name in ("in 16 bits", "FSDP1 in 16 bits"):
            check(runs.pop(name), torch.float32, autocast=True)
        check(runs.pop("FSDP1"), torch.float32)
        check(runs.pop("accumulated"), torch.float64, batches_a_step=2)
        assert len(runs) == 5
        for found in runs.values():
            check(found, torch.float64)
