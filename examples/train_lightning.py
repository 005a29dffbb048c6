"""Training over data x context ranks with Lightning's Trainer, and rings that deal the tokens.

python examples/train_lightning.py                                      # 2 x 2 local processes
torchrun --standalone --nproc-per-node 4 examples/train_lightning.py    # or several machines: with num_nodes below
"""

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from task import STEPS, device, main, new_model, new_optimiser, sequence

import longring as lr
from longring.integrations.lightning import RingStrategy
from longring.nn import cross_entropy


class Training(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = new_model()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        mesh = self.trainer.strategy.mesh
        s = lr.Sharding(length=batch[0].shape[1], group=mesh["context"], layout="zigzag")
        tokens, targets = (s.shard(whole) for whole in batch)  # the same on all ranks of a ring
        logits = self.model(tokens, sharding=s)
        loss = cross_entropy(logits, targets, sharding=s, group=mesh, gradients="mean")
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return new_optimiser(self)


def program(data: int, context: int) -> list[float]:
    """What each rank runs; the losses it saw, which are the same on all."""
    whole = [sequence(number) for number in range(STEPS * data)]
    training = Training()
    trainer = Trainer(
        accelerator="gpu" if device().type == "cuda" else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=RingStrategy(context=context),
        max_epochs=1,
        overfit_batches=1.0,  # in order, to compare with one process: otherwise it shuffles
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(training, torch.utils.data.DataLoader(whole, batch_size=1))
    return training.losses


if __name__ == "__main__":
    main(program, __doc__)
