"""From what a user calls a group to a transport."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..errors import ArgumentError
from .alone import Alone
from .contract import Transport
from .process_group import ProcessGroupTransport, new_group, node_ranks_of


def transport_for(group: object) -> Transport:
    """The transport of a group, one and the same each time; None is this process alone."""
    if group is None:
        return Alone()
    if isinstance(group, Transport):
        return group
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return _over_group(group, None)
    if dist.is_available() and isinstance(group, dist.DeviceMesh):
        return _over_mesh(group)
    if dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("this rank is not in the group it was given; only its members call with it")
    raise ArgumentError(f"group must be a longring transport, a torch ProcessGroup or a DeviceMesh; got {group!r}")


_over_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, ProcessGroupTransport]] = WeakKeyDictionary()
_made_for_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def _over_group(group: dist.ProcessGroup, node_ranks: int | None) -> ProcessGroupTransport:
    known = _over_groups.setdefault(group, {})
    try:
        close = node_ranks_of(group) if node_ranks is None else node_ranks
    except (KeyError, ValueError):
        raise ArgumentError("group is not known to torch.distributed; was it destroyed? make a new one") from None
    if close not in known:
        known[close] = ProcessGroupTransport(group, close)
    return known[close]


def transport_named(group_name: str, node_ranks: int) -> ProcessGroupTransport:
    """The transport of a group that has this name in torch.distributed."""
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    return _over_group(group, node_ranks)


def _over_mesh(mesh: dist.DeviceMesh) -> ProcessGroupTransport:
    """A mesh of two dimensions is one ring of rows: those of a row are close to each other."""
    if mesh.ndim > 2:
        raise ArgumentError(f"group must be a DeviceMesh of one or two dimensions, got {mesh.ndim}: {mesh}")
    if mesh.get_coordinate() is None:
        raise ArgumentError(f"this rank is not in the mesh it was given: {mesh}")
    if mesh.ndim == 1:
        return _over_group(mesh.get_group(), None)
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten())
    if list(ranks) != sorted(ranks):
        raise ArgumentError(f"group must be a DeviceMesh whose ranks rise, since torch's groups do; got {mesh}")
    return _over_group(_group_of(ranks), mesh.mesh.shape[1])


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # or there would be no mesh
    if ranks == tuple(range(dist.get_world_size())):
        return world
    made = _made_for_meshes.setdefault(world, {})
    if ranks not in made:
        made[ranks] = new_group(ranks)
    return made[ranks]


def world_size() -> int:
    """How many processes torch.distributed knows of; 1 where it was never initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
