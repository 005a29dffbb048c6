"""Integers that kernels read instead of arguments, on the device since the first call of their kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_OF_GRAPHS: dict[int, tuple[Tensor, ...]] = {}  # never forgotten; for each kind of call kilobytes, or a few megabytes


class Tables:
    """Tables that go together, whole before anybody reads them, on whatever stream."""

    def __init__(self, tables: Sequence[Tensor], device: torch.device) -> None:
        self._tables = tuple(_sent(table, device) for table in tables)
        self._readers: set[int] = set()  # streams, each of which is to be asked but once

    @property
    def bytes(self) -> int:
        return sum(table.nbytes for table in self._tables)

    def read(self) -> tuple[Tensor, ...]:
        """For kernels that are launched on the current stream."""
        first = self._tables[0]
        if not first.is_cuda:
            return self._tables
        if torch.cuda.is_current_stream_capturing():  # what is replayed may be so when the call is long forgotten
            _OF_GRAPHS[first.data_ptr()] = self._tables
        if (reader := torch._C._cuda_getCurrentRawStream(first.device.index)) not in self._readers:
            for table in self._tables:
                table.record_stream(torch.cuda.current_stream(first.device))  # forgotten, it must outlast its readers
            self._readers.add(reader)
        return self._tables


def _sent(table: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return table
    with torch.cuda.stream(torch.cuda.Stream(device)):  # the host waits for this copy alone, not for the device
        return table.to(device)
