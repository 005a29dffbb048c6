"""torch.compile of a model that trains over a ring of two ranks: the losses, and the weights, of one process."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_runs import Place, Run, check, made, optimiser_of, trained, whole_parameters

import longring as lr
from longring.nn import cross_entropy

pytestmark = pytest.mark.processes


def compiled_whole(place):
    """One graph for all of it, around which DDP reduces gradients."""
    return DistributedDataParallel(torch.compile(made(torch.float64), backend="aot_eager", fullgraph=True))


def compiled_and_recomputed(place):
    """Attention over ranks breaks the graph of a checkpoint's body, since PyTorch recomputes no effects."""
    model = made(torch.float64, checkpoint_activations=True)
    return DistributedDataParallel(torch.compile(model, backend="aot_eager"))


@cache  # or each step would be compiled anew
def compiled_loss(model, s, mesh):
    def loss(tokens, targets):
        return cross_entropy(model(tokens, sharding=s), targets, sharding=s, group=mesh, gradients="mean")

    return torch.compile(loss, backend="aot_eager")


class WithItsLoss(Place):
    """A graph that ends where the loss begins to talk with the other ranks."""

    def loss(self, model, number, gradients="mean"):
        return compiled_loss(model, self.sharding, self.mesh)(*self.batch(number))


def compiled_by_layers(place):
    """A graph for each layer, between which FSDP2 gathers and frees parameters."""
    model = made(torch.float64)
    for layer in model.stack.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
        fully_shard(layer, mesh=place.mesh)
    return fully_shard(model, mesh=place.mesh)


def every_run():
    import torch._dynamo

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    place, found = Place.on_a_mesh(1, 2), []
    for compiled in (compiled_whole, compiled_by_layers, compiled_and_recomputed):
        torch._dynamo.reset()
        model = compiled(place)
        losses = trained(place, model, optimiser_of(model))
        found.append(Run(losses, whole_parameters(model)))
    torch._dynamo.reset()
    model = DistributedDataParallel(made(torch.float64))
    losses = trained(WithItsLoss(place.mesh, place.sharding), model, optimiser_of(model))
    return [*found, Run(losses, whole_parameters(model))]


def test_every_rank_has_the_run_of_one_process():
    for runs in lr.launch(every_run, ranks=2, timeout=110):
        for run in runs:
            check(run, torch.float64)
