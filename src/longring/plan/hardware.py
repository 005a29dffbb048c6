"""Machines as data: what a rank's device and its links can do, read from TOML, each number with its source.

`hardware.toml` beside this file has those that everybody asks for; a file of the same form adds others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from ..errors import ArgumentError
from .user_files import read_toml

Phase = Literal["forward", "backward"]

BUILT_IN = Path(__file__).with_name("hardware.toml")
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
"""Bytes of a number, by the name of its type."""

TINY, HUGE = 1e-15, 1e30  # no machine has numbers beyond, and sums of them stay numbers

RATED_HEAD_DIM = 128
PER_PAIR = {"forward": 0.23, "backward": 0.15}
"""Share of the time at the rated head dim that a pair of query and key costs whatever its head dim (the exponential).

An H200 attains 0.83 (forward) and 0.87 (backward) of its rate at 128 with heads of 64: docs/records/h200.json.
"""


@dataclass(frozen=True)
class Link:
    """A way for bytes from one rank to another, in one direction; the other direction has as much again."""

    name: str
    bytes_per_second: float
    latency_seconds: float
    source: str


@dataclass(frozen=True)
class Hardware:
    """What one rank computes with, and what joins it to others."""

    name: str
    title: str
    device: Literal["cuda", "cpu"]
    memory_bytes: int  # that tensors can take
    forward_flops: Mapping[str, float] = field(hash=False)  # attained by attention on large tiles, by dtype
    backward_flops: Mapping[str, float] = field(hash=False)
    half_rate_rows: int  # a tile of so many rows runs at half of it
    memory_bytes_per_second: float
    launch_seconds: float  # of every call of a kernel, whatever its size
    inside: Link  # between two ranks of a node: each rank has its own
    outside: Link  # between nodes
    links_out: int  # of the outside kind that the ranks of a node share
    ranks_per_node: int
    sources: Mapping[str, str] = field(hash=False, repr=False)

    def flops(self, phase: Phase, *, itemsize: int, head_dim: int = RATED_HEAD_DIM, rows: float | None = None) -> float:
        """FLOP/s attained by tiles of so many rows, of numbers of so many bytes.

        A pair of a query and a key is 4 d FLOPs forward and 10 d backward, only pairs that count are counted.
        """
        large = self._rates(phase, itemsize) / (1 + PER_PAIR[phase] * (max(1.0, RATED_HEAD_DIM / head_dim) - 1))
        return large if rows is None else large * rows / (rows + self.half_rate_rows)

    def _rates(self, phase: Phase, itemsize: int) -> float:
        rates = self.forward_flops if phase == "forward" else self.backward_flops
        for dtype, flops in rates.items():
            if DTYPES[dtype] == itemsize:
                return flops
        raise ArgumentError(
            f"hardware {self.name!r} has no {phase}_flops for numbers of {itemsize} bytes; it has {', '.join(rates)}"
        )

    def link(self, sender: int, receiver: int, node_ranks: int) -> Link:
        """What joins two ranks, of which `node_ranks` consecutive ones share a node."""
        return self.inside if sender // node_ranks == receiver // node_ranks else self.outside

    def out_of_node(self, node_ranks: int) -> float:
        """Bytes a second that a rank sends to other nodes while all ranks of its node do."""
        return self.outside.bytes_per_second * min(1.0, self.links_out / node_ranks)


def hardware(name: str, file: Path | None = None) -> Hardware:
    """The machine of this name, from a file if it has it, else one that longring knows."""
    known = all_hardware(file)
    found = known.get(name) or known.get(name.lower())  # ours are all in small letters, whatever is on the box
    if found is None:
        where = "" if file is None else f", {file} included"
        raise ArgumentError(f"hardware {name!r} is unknown{where}; there is {', '.join(known)}")
    return found


def link(name: str, file: Path | None = None) -> Link:
    """The link of this name, from a file if it has it, else one that longring knows."""
    known = _links(_loaded(BUILT_IN), BUILT_IN) | ({} if file is None else _links(_loaded(file), file))
    if name not in known:
        raise ArgumentError(f"link {name!r} is unknown; there is {', '.join(known)}")
    return known[name]


def all_hardware(file: Path | None = None) -> dict[str, Hardware]:
    """By name: those that longring knows, and those of the file, which may take a known name or use a known link."""
    return dict(_built_in()) if file is None else {**_built_in(), **_read(file, _links(_loaded(BUILT_IN), BUILT_IN))}


@lru_cache(maxsize=1)
def _built_in() -> dict[str, Hardware]:
    return _read(BUILT_IN, {})


# ------------------------------------------------------------------------------------------------ reading


def _read(file: Path, known_links: dict[str, Link]) -> dict[str, Hardware]:
    told = _loaded(file)
    if unknown := set(told) - {"links", "hardware"}:
        raise ArgumentError(f"{file}: {sorted(unknown)[0]!r} must be [links.NAME] or [hardware.NAME]")
    links = {**known_links, **_links(told, file)}
    return {name: _machine(name, entry, links, file) for name, entry in _tables(told, "hardware", file).items()}


def _loaded(file: Path) -> dict[str, Any]:
    return read_toml(file, str(file))


def _links(told: dict[str, Any], file: Path) -> dict[str, Link]:
    found: dict[str, Link] = {}
    for name, entry in _tables(told, "links", file).items():
        where = f"{file}: [links.{name}]"
        _check_fields(entry, {"bytes_per_second", "latency_seconds", "source"}, where)
        speed = _number(entry, "bytes_per_second", where)
        delay = _number(entry, "latency_seconds", where, least=0.0)
        found[name] = Link(name, speed, delay, _text(entry, "source", where))
    return found


SOURCED = (
    "memory_bytes",
    "forward_flops",
    "backward_flops",
    "half_rate_rows",
    "memory_bytes_per_second",
    "launch_seconds",
    "ranks_per_node",
)
"""Fields that must say where they come from; links say it themselves."""


def _machine(name: str, entry: dict[str, Any], links: dict[str, Link], file: Path) -> Hardware:
    where = f"{file}: [hardware.{name}]"
    _check_fields(entry, {one.name for one in fields(Hardware)} - {"name"}, where)
    forward, backward = (_flops(entry, key, where) for key in ("forward_flops", "backward_flops"))
    if set(forward) != set(backward):
        raise ArgumentError(
            f"{where} backward_flops has {', '.join(backward)}, forward_flops {', '.join(forward)}: "
            "they must be of the same types"
        )
    return Hardware(
        name=name,
        title=_text(entry, "title", where),
        device=_device(entry, where),
        memory_bytes=_whole(entry, "memory_bytes", where),
        forward_flops=forward,
        backward_flops=backward,
        half_rate_rows=_whole(entry, "half_rate_rows", where),
        memory_bytes_per_second=_number(entry, "memory_bytes_per_second", where),
        launch_seconds=_number(entry, "launch_seconds", where),
        inside=_link(entry, "inside", links, where),
        outside=_link(entry, "outside", links, where),
        links_out=_whole(entry, "links_out", where),
        ranks_per_node=_whole(entry, "ranks_per_node", where),
        sources=_sources(entry["sources"], f"{file}: [hardware.{name}.sources]"),
    )


def _sources(told: Any, where: str) -> dict[str, str]:
    if not isinstance(told, dict):
        raise ArgumentError(f"{where} must be a table with a text for each of {', '.join(SOURCED)}, got {told!r}")
    _check_fields(told, set(SOURCED), where)
    return {key: _text(told, key, where) for key in SOURCED}


def _device(entry: dict[str, Any], where: str) -> Literal["cuda", "cpu"]:
    if entry["device"] not in ("cuda", "cpu"):
        raise ArgumentError(f"{where} device must be cuda or cpu, got {entry['device']!r}")
    return entry["device"]


def _tables(told: dict[str, Any], kind: str, file: Path) -> dict[str, dict[str, Any]]:
    tables = told.get(kind, {})
    if not isinstance(tables, dict) or not all(isinstance(entry, dict) for entry in tables.values()):
        raise ArgumentError(f"{file}: {kind} must be tables, as [{kind}.NAME]")
    return tables


def _check_fields(entry: dict[str, Any], wanted: set[str], where: str) -> None:
    if missing := wanted - set(entry):
        raise ArgumentError(f"{where} lacks {', '.join(sorted(missing))}")
    if unknown := set(entry) - wanted:
        raise ArgumentError(f"{where} has {sorted(unknown)[0]!r}, which is none of {', '.join(sorted(wanted))}")


def _flops(entry: dict[str, Any], key: str, where: str) -> dict[str, float]:
    rates = entry[key]
    if not isinstance(rates, dict) or not rates or not set(rates) <= set(DTYPES):
        raise ArgumentError(f"{where} {key} must be a table with some of {', '.join(DTYPES)}, got {rates!r}")
    return {dtype: _number(rates, dtype, f"{where} {key}") for dtype in rates}


def _number(entry: dict[str, Any], key: str, where: str, least: float | None = None) -> float:
    value = entry[key]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (value > 0 if least is None else value >= least) or value == float("inf"):
        what = "a number above 0" if least is None else f"a number from {least:g} on"
        raise ArgumentError(f"{where} {key} must be {what}, got {value!r}")
    if value and not TINY <= value <= HUGE:
        raise ArgumentError(f"{where} {key} must be from {TINY:g} to {HUGE:g}, got {value!r}")
    return float(value)


def _whole(entry: dict[str, Any], key: str, where: str) -> int:
    value = _number(entry, key, where)
    if value != int(value):
        raise ArgumentError(f"{where} {key} must be a whole number, got {entry[key]!r}")
    return int(value)


def _text(entry: dict[str, Any], key: str, where: str) -> str:
    value = entry[key]
    if not isinstance(value, str) or not value.strip():
        raise ArgumentError(f"{where} {key} must be a text that is not empty, got {value!r}")
    return value


def _link(entry: dict[str, Any], key: str, links: dict[str, Link], where: str) -> Link:
    if not isinstance(entry[key], str) or entry[key] not in links:
        raise ArgumentError(f"{where} {key} must name one of the links {', '.join(links)}, got {entry[key]!r}")
    return links[entry[key]]
