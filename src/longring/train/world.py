"""The ranks of a training run: a mesh of rings, and the few numbers and gradients that all of them add up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, LongringError, PeerLost
from ..sharding import Sharding
from .config import Config

NUMBERS_AT_A_TIME = 1 << 23  # gradients that are summed in one message: 32 MiB in float32


@dataclass(frozen=True)
class World:
    """Where this rank stands: in one of the rings (`data_rank`), which has a part of every token of its sequences.

    context:  the group of the ring, as a Sharding takes it.
    """

    rank: int
    size: int
    data_rank: int
    device: torch.device
    context: Any
    everybody: dist.DeviceMesh
    timeout: float

    @classmethod
    def joined(cls, config: Config) -> World:
        """As one of the ranks of an initialised process group; `config` is settled for that many."""
        size = dist.get_world_size()
        assert config.ranks == size
        assert config.context_ranks is not None
        device = _device(config.device)
        whole = dist.init_device_mesh(device.type, (size,), mesh_dim_names=("all",))
        return cls(
            rank=dist.get_rank(),
            size=size,
            data_rank=dist.get_rank() // config.context_ranks,
            device=device,
            context=_ring(device, config),
            everybody=whole,
            timeout=config.timeout,
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sharding(self, config: Config, documents: Any) -> Sharding:
        """How a sequence is dealt over the ring; `dealt` and `auto` look at where its documents end."""
        assert config.context is not None
        if config.layout == "auto":
            return Sharding(config.context, self.context, "auto", pattern=config.pattern(documents))
        if config.layout == "dealt":
            documents = (0, config.context) if documents is None else documents
            return Sharding(config.context, self.context, "dealt", documents=documents)
        return Sharding(config.context, self.context, config.layout)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Their sums over all ranks, to the bit the same on each of them."""
        summed = torch.tensor(numbers, dtype=torch.float64)
        self._sum(summed)
        return summed.tolist()

    def add_up(self, gradients: Iterable[Tensor]) -> None:
        """Each becomes its sum over all ranks, the same bits everywhere. Few messages, whatever the number of them."""
        if self.size == 1:
            return
        for some in _bundles(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in some])
            self._sum(flat)
            parts = flat.split([gradient.numel() for gradient in some])
            for gradient, part in zip(some, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _sum(self, numbers: Tensor) -> None:
        work = dist.all_reduce(numbers, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=self.timeout))  # over NCCL, too: a stream would wait for a lost rank forever

    @contextmanager
    def telling_of_lost_peers(self, during: str) -> Iterator[None]:
        """What torch says of a peer that is gone or silent, in one line that names the step."""
        try:
            yield
        except LongringError:
            raise
        except RuntimeError as error:
            if not _comes_of_a_peer(error):
                raise
            first = str(error).strip().splitlines()[0]
            raise PeerLost(f"rank {self.rank} lost another rank in {during}: {first}") from error


def _ring(device: torch.device, config: Config) -> Any:
    """The ranks that share a sequence are neighbours; with nodes, a mesh of two dimensions."""
    assert config.context_ranks is not None
    data, context, node = config.data_ranks, config.context_ranks, config.node_ranks
    if node is None or node in (1, context):
        mesh = dist.init_device_mesh(device.type, (data, context), mesh_dim_names=("data", "context"))
        return mesh["context"]
    shape, names = (data, context // node, node), ("data", "nodes", "node")
    return dist.init_device_mesh(device.type, shape, mesh_dim_names=names)["nodes", "node"]


def _device(name: str) -> torch.device:
    has_gpu = "nccl" in str(dist.get_backend_config())
    if name == "cuda" and not has_gpu:
        raise ArgumentError(
            "--device cuda needs a GPU for each rank of a machine, and NCCL; use fewer, or --device cpu"
        )
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def _bundles(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    some: list[Tensor] = []
    for gradient in gradients:
        if some and sum(one.numel() for one in some) + gradient.numel() > NUMBERS_AT_A_TIME:
            yield some
            some = []
        some.append(gradient)
    if some:
        yield some


def _comes_of_a_peer(error: BaseException) -> bool:
    """Gloo has no error of its own, only its source's path in the text."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
