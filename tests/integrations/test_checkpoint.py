"""torch.distributed.checkpoint: what 2 x 2 ranks of FSDP2 save, others continue with the same losses."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from training_runs import STEPS, Place, Run, check, made, optimiser_of, trained, whole_parameters

import longring as lr

pytestmark = pytest.mark.processes


def set_up(data, context):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    place = Place.on_a_mesh(data, context)
    model = fully_shard(made(torch.float64), mesh=dist.init_device_mesh("cpu", (data * context,)))
    return place, model, optimiser_of(model)


def state(model, optimiser):
    parameters, moments = get_state_dict(model, optimiser)
    return {"model": parameters, "optimiser": moments}


def saved(at_once, meanwhile):
    """A step, saved twice: before going on, and while it goes on."""
    place, model, optimiser = set_up(2, 2)
    # the thread that saves talks too, and must not be heard where training is
    apart = dist.new_group(backend="gloo")
    losses = trained(place, model, optimiser, steps=range(1))
    dcp.save(state(model, optimiser), checkpoint_id=at_once)
    saving = dcp.async_save(state(model, optimiser), checkpoint_id=meanwhile, process_group=apart)
    losses += trained(place, model, optimiser, steps=range(1, STEPS))
    saving.result()
    return Run(losses, whole_parameters(model))


def continued(folder, data, context):
    place, model, optimiser = set_up(data, context)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # nothing is to be left of what it began with
    found = state(model, optimiser)
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(model, optimiser, model_state_dict=found["model"], optim_state_dict=found["optimiser"])
    losses = trained(place, model, optimiser, steps=range(1, STEPS))
    return Run(losses, whole_parameters(model))


def test_other_ranks_go_on_where_these_were(tmp_path):
    at_once, meanwhile = str(tmp_path / "at once"), str(tmp_path / "meanwhile")
    for run in lr.launch(saved, at_once, meanwhile, ranks=4, timeout=60):
        check(run, torch.float64)
    for folder, data, context in ((at_once, 1, 2), (meanwhile, 2, 1)):
        for run in lr.launch(continued, folder, data, context, ranks=2, timeout=60):
            check(run, torch.float64, since=1)
