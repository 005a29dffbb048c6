"""Who is judged: the model of a run's newest checkpoint, on the ranks that there are now."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...models.stack import LanguageModel
from ...numerics.online_softmax import accumulator_dtype
from ...sharding import Sharding
from ..about import About
from ..checkpoints import Found
from ..config import Config
from ..job import new_model
from ..weights import load_weights, newest
from ..world import World

ROWS = 1024  # of logits that are widened at a time


class Listener(Protocol):
    """Who hears how far an evaluation is, on the first rank alone."""

    def begin(self, total: int) -> None: ...

    def advance(self, count: int) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class Setting:
    """Where a run is judged, and on what sequences: None is as the run had them, or all ranks in one ring."""

    folder: str
    ranks: int
    device: str
    context: int | None = None
    context_ranks: int | None = None
    layout: str = "auto"
    schedule: str = "auto"
    timeout: float = 600.0


@dataclass(frozen=True)
class Subject:
    """A model in the state of one of its checkpoints; every rank has all weights.

    config:  of the run, settled for the ranks of now.
    """

    config: Config
    world: World
    model: LanguageModel
    vocabulary: int
    checkpoint: Found
    about: About

    @classmethod
    def of(cls, setting: Setting) -> Subject:
        """On every rank of an initialised process group."""
        group: Any = dist.group.WORLD
        found = newest(Path(setting.folder), group=group, timeout=setting.timeout, of="CHECKPOINT")
        about = About.of(found)
        about.check_size(found)
        config = _settled(about.config, setting)
        world = World.joined(config)
        model = new_model(config, about.vocabulary).to(world.device)
        load_weights(found, model, group=group, timeout=setting.timeout)
        return cls(config, world, model.eval(), about.vocabulary, found, about)

    def sharding(self, length: int, documents: Any = None) -> Sharding:
        """How a sequence of any length is dealt over this rank's ring."""
        return self.world.sharding(replace(self.config, context=length), documents)

    def numerics(self) -> torch.autocast:
        """As in training: 16 bits where the run had them."""
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.dtype == "bf16")

    @torch.no_grad()
    def losses(self, tokens: Tensor, targets: Tensor, sharding: Sharding, documents: Any) -> Tensor:
        """Of each of this rank's tokens, [batch, n]; 0 where nothing is to be predicted."""
        with self.numerics():
            logits = self.model(tokens, sharding=sharding, documents=documents)
        wide = accumulator_dtype(logits.dtype)
        some = zip(logits.flatten(0, 1).split(ROWS), targets.flatten().split(ROWS), strict=True)
        return torch.cat([F.cross_entropy(x.to(wide), y, reduction="none") for x, y in some]).view_as(targets)

    @property
    def ring(self) -> tuple[int, int]:
        """(which of the rings this rank is in, how many there are): rings share out sequences."""
        return self.world.data_rank, self.config.data_ranks

    def describe(self) -> dict[str, Any]:
        """What was judged, for a record."""
        return {
            "folder": str(self.checkpoint.folder),
            "step": self.checkpoint.step,
            "saved_by_ranks": self.checkpoint.ranks,
            "skipped": [f"{name}: {why}" for name, why in self.checkpoint.skipped],
            "config": self.config.as_json(),
        }


def _settled(was: Config, setting: Setting) -> Config:
    now = replace(
        was,
        context=setting.context or cast(int, was.context),
        ranks=None,
        context_ranks=setting.context_ranks,
        node_ranks=None,
        layout=setting.layout,
        schedule=setting.schedule,
        kernel="auto",
        device=setting.device,
        batch=None,
        micro_batch=1,
        fsdp=False,
        activation_checkpointing=False,
        timeout=setting.timeout,
    )
    return now.settled(device=setting.device, ranks=setting.ranks)
