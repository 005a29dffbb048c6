"""Lightning: DDP over rings of ranks, each of which reads the samples of its ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.fabric.strategies import DDPStrategy as OfFabric
from lightning.pytorch.strategies import DDPStrategy as OfTrainer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import ArgumentError

_Base: Any = OfTrainer if TYPE_CHECKING else object


class _Rings(_Base):
    """What the strategies of Trainer and Fabric share.

    Lightning gives each rank samples of its own. Ranks of a ring hold parts of the same sequences, so it is rings that
    get samples of their own here.
    """

    def __init__(self, *, context: int, **options: Any) -> None:
        if not isinstance(context, int) or isinstance(context, bool) or context < 1:
            raise ArgumentError(f"context must be a whole number of ranks, at least 1; got {context!r}")
        super().__init__(**options)
        self.context = context
        self._mesh: DeviceMesh | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """(data, context): `mesh["context"]` is this rank's ring, and the whole of it what a loss is averaged over."""
        if self._mesh is None:
            raise ArgumentError("the mesh is there once Lightning has started the ranks: from setup() or launch() on")
        return self._mesh

    def setup_environment(self) -> None:
        super().setup_environment()
        shape = (self._rings(), self.context)
        self._mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("data", "context"))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self._rings(), "rank": self.global_rank // self.context}

    def _rings(self) -> int:
        if self.world_size % self.context:
            raise ArgumentError(f"{self.world_size} ranks are no whole number of rings of {self.context}")
        return self.world_size // self.context


class RingStrategy(_Rings, OfTrainer):
    """`Trainer(strategy=RingStrategy(context=4))`: DDP over rings of 4 ranks; options are those of DDPStrategy.

    In a LightningModule, `self.trainer.strategy.mesh` is the mesh of data and context.
    """


class FabricRingStrategy(_Rings, OfFabric):
    """`Fabric(strategy=FabricRingStrategy(context=4))`: the same; `fabric.strategy.mesh` is the mesh."""
