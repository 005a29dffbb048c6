"""From what a user calls a group to a transport."""

from __future__ import annotations

import torch.distributed as dist

from ..errors import ArgumentError, NotBuilt
from .alone import Alone
from .contract import Transport


def transport_for(group: object) -> Transport:
    """The transport of a group; None is this process alone."""
    if group is None:
        return Alone()
    if isinstance(group, Transport):
        return group
    if dist.is_available() and isinstance(group, (dist.ProcessGroup, dist.DeviceMesh)):
        raise NotBuilt(
            f"group is a {type(group).__name__}, and transport over torch.distributed is not built yet; "
            "use the group that longring.testing.run_ranks gives each rank, or longring.simulate"
        )
    raise ArgumentError(f"group must be a longring transport, a torch ProcessGroup or a DeviceMesh; got {group!r}")


def world_size() -> int:
    """How many processes torch.distributed knows of; 1 where it was never initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
