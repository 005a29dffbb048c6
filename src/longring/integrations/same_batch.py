"""A consistency check of the batch that the ranks of one sequence were given, by a checksum of each tensor.

Ranks that are given different batches of the same lengths would otherwise compute a wrong loss without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Disagreement
from ..transport.contract import Transport
from ..transport.process_group import ProcessGroupTransport

CALL = "shard_batch"
REMEDY = (
    "shard_batch needs the same batch on every rank of a sequence's group; a data loader or sampler that gives each "
    "rank examples of its own must do so per group, and a collator that draws at random must draw the same on its ranks"
)
# Odd constants of splitmix64 as int64, whose products wrap around on every device
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


class Checksum(NamedTuple):
    """What stands for a tensor in the comparison."""

    shape: tuple[int, ...]
    bits: int | None  # None where there are no values to look at

    def __repr__(self) -> str:
        words = "no values" if self.bits is None else f"checksum {self.bits % 2**64:016x}"
        return f"{list(self.shape)} with {words}"


def check_same_batch(
    transport: Transport,
    tensors: Mapping[str, Tensor | None],
    facts: Mapping[str, object],
    *,
    timeout: float | None = None,
) -> None:
    """Raise Disagreement on every rank unless all ranks were given the same tensors and the same facts.

    One pass over the values, one small exchange (log2(ranks) messages of 32 bytes per rank over the host), and on a
    GPU one wait for the device, where the checksums are computed.
    """
    if transport.size == 1:
        return
    terms = {"call": CALL, **checksums(tensors), **facts}
    try:
        with transport.converse(terms, timeout=timeout) as talk:
            # A process group compares the terms by itself. Ranks that are threads compare them with those of a message.
            others = [] if isinstance(transport, ProcessGroupTransport) else _others(transport)
            nothing = torch.empty(0)
            talk.post([(rank, nothing) for rank in others], [(rank, nothing) for rank in others], what=CALL).wait()
    except Disagreement as error:
        if not any(f"{name} is " in str(error) or f"{name}: " in str(error) for name in terms if name != "call"):
            raise  # the others make another call
        raise Disagreement(f"{REMEDY}: {error}") from None


def _others(transport: Transport) -> list[int]:
    return [rank for rank in range(transport.size) if rank != transport.rank]


def checksums(tensors: Mapping[str, Tensor | None]) -> dict[str, Checksum | None]:
    """By name. The device is waited for once."""
    there = {name: x for name, x in tensors.items() if x is not None}
    seen = [name for name, x in there.items() if not x.is_meta]
    bits = dict.fromkeys(there, None) | dict(zip(seen, _values([_mixed(there[name]) for name in seen]), strict=True))
    return {name: None if x is None else Checksum(tuple(x.shape), bits[name]) for name, x in tensors.items()}


def _values(scalars: list[Tensor]) -> list[int]:
    return torch.stack([x.to(scalars[0].device) for x in scalars]).tolist() if scalars else []


def _mixed(x: Tensor) -> Tensor:
    """The sum over all elements of a hash of (value, place), as int64, which does not depend on the device."""
    mixed = torch.arange(1, x.numel() + 1, device=x.device).mul_(_STEP).add_(x.detach().flatten())
    mixed = (mixed ^ (mixed >> 30)).mul_(_FIRST)
    mixed = (mixed ^ (mixed >> 27)).mul_(_SECOND)
    return (mixed ^ (mixed >> 31)).sum()
