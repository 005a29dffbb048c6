"""Lightning's Trainer and Fabric over rings: the losses, and the weights, of one process."""

from __future__ import annotations

import logging
import warnings
from importlib.util import find_spec

import pytest
import torch
from training_runs import BATCH, LENGTH, STEPS, Place, Run, check, made, optimiser_of, whole_batch, whole_parameters

import longring as lr
from longring.nn import cross_entropy

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]


def samples():
    """One after the other, as a sampler deals them out: those of the first step, of the second, ..."""
    return [(t, y) for step in range(STEPS) for t, y in zip(*whole_batch(step), strict=True)]


class Whole(torch.nn.Module):
    """Loss of whole sequences, of which this rank takes its part. Fabric looks into what a forward is given, and
    refuses frozen dataclasses, such as a Sharding: so it is made in here."""

    def __init__(self, mesh):
        super().__init__()
        self.model = made(torch.float32)
        self.place = Place(mesh, lr.Sharding(LENGTH, mesh["context"]))

    def forward(self, tokens, targets):
        s, mesh = self.place.sharding, self.place.mesh
        logits = self.model(s.shard(tokens), sharding=s)
        return cross_entropy(logits, s.shard(targets), sharding=s, group=mesh, gradients="mean")


def by_trainer():
    from lightning.pytorch import LightningModule, Trainer

    from longring.integrations.lightning import RingStrategy

    class Module(LightningModule):
        def configure_model(self):
            self.whole = Whole(self.trainer.strategy.mesh)
            self.losses = []

        def training_step(self, batch, _):
            loss = self.whole(*batch)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return optimiser_of(self)

    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=RingStrategy(context=2),
        max_epochs=1,
        overfit_batches=1.0,  # all of them, and in order: it shuffles otherwise
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(samples(), batch_size=BATCH // 2))
    return Run(module.losses, whole_parameters(module.whole.model))


def by_fabric():
    from lightning.fabric import Fabric

    from longring.integrations.lightning import FabricRingStrategy

    fabric = Fabric(accelerator="cpu", devices=4, strategy=FabricRingStrategy(context=2))
    fabric.launch()
    whole = Whole(fabric.strategy.mesh)
    model, optimiser = fabric.setup(whole, optimiser_of(whole))
    losses = []
    for tokens, targets in fabric.setup_dataloaders(torch.utils.data.DataLoader(samples(), batch_size=BATCH // 2)):
        optimiser.zero_grad()
        loss = model(tokens, targets)
        fabric.backward(loss)
        optimiser.step()
        losses.append(loss.item())
    return Run(losses, whole_parameters(whole.model))


def misused():
    from lightning.fabric import Fabric

    from longring.integrations.lightning import FabricRingStrategy

    with pytest.raises(lr.ArgumentError, match="context must be a whole number of ranks, at least 1; got 0"):
        FabricRingStrategy(context=0)
    strategy = FabricRingStrategy(context=3)
    with pytest.raises(lr.ArgumentError, match="the mesh is there once Lightning has started the ranks"):
        _ = strategy.mesh
    with pytest.raises(lr.ArgumentError, match="4 ranks are no whole number of rings of 3"):
        Fabric(accelerator="cpu", devices=4, strategy=strategy).launch()


def every_run():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    misused()
    return by_trainer(), by_fabric()


def test_every_rank_has_the_run_of_one_process():
    for runs in lr.launch(every_run, ranks=4, timeout=110):
        for run in runs:
            check(run, torch.float32)


def test_a_row_of_the_mesh_is_a_ring(monkeypatch):
    """Of twelve ranks, which need not be there to be counted."""
    from longring.integrations import lightning as ours

    meshes = []
    monkeypatch.setattr(ours, "init_device_mesh", lambda device, shape, **names: meshes.append((device, shape, names)))
    monkeypatch.setattr(ours.OfFabric, "setup_environment", lambda self: None)
    for name, value in {"world_size": 12, "global_rank": 7, "root_device": torch.device("cpu")}.items():
        monkeypatch.setattr(ours.FabricRingStrategy, name, value)
    strategy = ours.FabricRingStrategy(context=3)
    strategy.setup_environment()
    assert meshes == [("cpu", (4, 3), {"mesh_dim_names": ("data", "context")})]
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 2}
