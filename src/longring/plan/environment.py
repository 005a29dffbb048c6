"""Whether an environment suits a ring: what is set, held against `advice`. Nothing is read from the machine here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """Where ranks will run, as far as it is known."""

    environment: Mapping[str, str]
    backend: str = "nccl"
    machines: int = 1
    ranks_here: int = 1
    cores: int | None = None
    interfaces: Collection[str] | None = None  # network interfaces of this machine
    nccl: tuple[int, ...] | None = None  # its version


class Concern(NamedTuple):
    """Something to change, or to know."""

    name: str  # of the variable
    level: str  # "wrong": it will fail or hang; "slow"; "note"
    text: str


_Check = Callable[[str, Place], tuple[str, str] | None]  # of a variable that is set: (level, text)

LEVELS = ("wrong", "slow", "note")


def concerns(place: Place) -> list[Concern]:
    """Everything worth saying, the worst first."""
    found = [*_about_what_is_set(place), *_about_what_is_missing(place)]
    return sorted(found, key=lambda concern: LEVELS.index(concern.level))


def _about_what_is_set(place: Place) -> Iterator[Concern]:
    for name, (backend, check) in _CHECKS.items():
        value = place.environment.get(name, "").strip()
        if value and backend in place.backend:
            said = check(value, place)
            if said is not None:
                yield Concern(name, said[0], f"{name}={value}: {said[1]}")


def _about_what_is_missing(place: Place) -> Iterator[Concern]:
    missing = {name for name in _WHEN_MISSING if not place.environment.get(name, "").strip()}
    if "gloo" in place.backend and place.machines > 1 and "GLOO_SOCKET_IFNAME" in missing:
        yield Concern("GLOO_SOCKET_IFNAME", "note", _WHEN_MISSING["GLOO_SOCKET_IFNAME"])
    if "nccl" in place.backend and "TORCH_NCCL_ASYNC_ERROR_HANDLING" in missing:
        yield Concern("TORCH_NCCL_ASYNC_ERROR_HANDLING", "note", _WHEN_MISSING["TORCH_NCCL_ASYNC_ERROR_HANDLING"])
    if place.backend == "gloo" and place.ranks_here > 1 and "OMP_NUM_THREADS" in missing:
        yield Concern("OMP_NUM_THREADS", "slow", _WHEN_MISSING["OMP_NUM_THREADS"])


_WHEN_MISSING = {
    "GLOO_SOCKET_IFNAME": "GLOO_SOCKET_IFNAME is not set: Gloo listens where this host's name points to; if that is "
    "127.0.1.1, the other machines will not reach it. Name the interface that all machines share",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING is not set: torch may end a process that lost "
    "a peer before it has saved anything; 2 leaves it alive",
    "OMP_NUM_THREADS": "OMP_NUM_THREADS is not set: every rank on this machine computes with all cores, and they slow "
    "each other down; set cores / ranks",
}


# What a value means


def _on(level: str, text: str) -> _Check:
    return lambda value, place: (level, text) if value != "0" else None


def _between_machines(check: _Check) -> _Check:
    return lambda value, place: check(value, place) if place.machines > 1 else None


def _any_value(level: str, text: str) -> _Check:
    return lambda value, place: (level, text)


def _distance(never: str) -> _Check:
    """LOC is never; numbers had other meanings in other versions."""

    def check(value: str, place: Place) -> tuple[str, str] | None:
        if value.upper() in ("LOC", "0"):
            return "slow", never
        if value.isdecimal():
            return "note", "the meaning of numbers changes between versions; give a name (NVL, PIX, PXB, PHB, SYS)"
        return None

    return check


def _gloo_interface(value: str, place: Place) -> tuple[str, str] | None:
    names = value.split(",")
    if place.machines > 1 and any(_is_loopback(name) for name in names):
        return "wrong", "loopback reaches no other machine"
    unknown = [] if place.interfaces is None else [name for name in names if name not in place.interfaces]
    return ("wrong", _not_here(unknown, place)) if unknown else None


def _nccl_interface(value: str, place: Place) -> tuple[str, str] | None:
    avoided, exact, names = _name_list(value)
    if avoided:
        return None
    if place.machines > 1 and all(_is_loopback(name) for name in names):
        return "wrong", "loopback reaches no other machine"
    if place.interfaces is None or any(_names(name, exact, there) for name in names for there in place.interfaces):
        return None
    return "wrong", _not_here(names, place)


def _name_list(value: str) -> tuple[bool, bool, list[str]]:
    """(names to avoid, exact names, the names) of `^=eth0,eth1`."""
    avoided = value.startswith("^")
    value = value.removeprefix("^")
    return avoided, value.startswith("="), value.removeprefix("=").split(",")


def _names(name: str, exact: bool, there: str) -> bool:
    return there == name if exact else there.startswith(name)


def _is_loopback(name: str) -> bool:
    return name in ("lo", "lo0")


def _not_here(names: Collection[str], place: Place) -> str:
    return f"this machine has no interface {', '.join(names)}; it has {', '.join(sorted(place.interfaces or ()))}"


def _adapters(value: str, place: Place) -> tuple[str, str] | None:
    _, exact, names = _name_list(value)
    if exact or not any(name.split(":")[0].rpartition("_")[2].isdecimal() for name in names):
        return None
    return "note", "without = these are prefixes, and mlx5_1 is mlx5_10 to mlx5_19, too"


def _address_entry(value: str, place: Place) -> tuple[str, str] | None:
    if value == "-1" or (place.nccl is not None and place.nccl < (2, 21)):
        return None
    return "note", "NCCL 2.21 and newer finds the entry by itself, and should be left to"


def _silence(value: str, place: Place) -> tuple[str, str] | None:
    if value.isdecimal() and 0 < int(value) < 32:
        return None
    return "wrong", "NCCL would wait for ever for a machine that is cut off; 1 to 31, the default is 20"


def _few_blocks(value: str, place: Place) -> tuple[str, str] | None:
    if value.isdecimal() and int(value) <= 2:
        return "slow", "so few CUDA blocks hardly fill a link"
    return None


def _error_handling(value: str, place: Place) -> tuple[str, str] | None:
    if value == "0":
        return "wrong", "an error of NCCL is noticed by nobody; 2 aborts the communicator and leaves the process alive"
    if value in ("1", "3"):
        return "note", "torch may end a process that lost a peer before it has saved anything; 2 leaves it alive"
    return None


def _threads(value: str, place: Place) -> tuple[str, str] | None:
    first = value.split(",")[0]
    if place.cores is None or not first.isdecimal() or int(first) * place.ranks_here <= place.cores:
        return None
    return "slow", (
        f"{place.ranks_here} ranks with {first} threads each on {place.cores} cores slow each other down; "
        f"set {max(1, place.cores // place.ranks_here)}"
    )


def _one_queue(value: str, place: Place) -> tuple[str, str] | None:
    if value != "1":
        return None
    return "note", "work of all streams starts in the order in which it was issued, which can keep transfers waiting"


# By variable: the backend that it concerns, and what to think of a value.
_CHECKS: Mapping[str, tuple[str, _Check]] = {
    "NCCL_P2P_DISABLE": ("nccl", _on("slow", "blocks go through host memory between the GPUs of this machine")),
    "NCCL_P2P_LEVEL": ("nccl", _distance("blocks go through host memory between the GPUs of this machine")),
    "NCCL_P2P_USE_CUDA_MEMCPY": ("nccl", _on("note", "not documented by NCCL: measure, and check results")),
    "NCCL_SHM_DISABLE": (
        "nccl",
        _on("slow", "GPUs without direct access talk through the network, even on one machine"),
    ),
    "NCCL_SOCKET_IFNAME": ("nccl", _nccl_interface),
    "NCCL_IB_DISABLE": ("nccl", _between_machines(_on("slow", "blocks travel over IP sockets"))),
    "NCCL_IB_HCA": ("nccl", _between_machines(_adapters)),
    "NCCL_IB_GID_INDEX": ("nccl", _between_machines(_address_entry)),
    "NCCL_IB_TIMEOUT": ("nccl", _between_machines(_silence)),
    "NCCL_NET_GDR_LEVEL": ("nccl", _between_machines(_distance("every block takes a detour through host memory"))),
    "NCCL_MAX_CTAS": ("nccl", _few_blocks),
    "NCCL_MAX_NCHANNELS": ("nccl", _any_value("note", "deprecated since NCCL 2.17: NCCL_MAX_CTAS is its name now")),
    "NCCL_MULTI_RANK_GPU_ENABLE": ("nccl", _on("note", "an experiment of NCCL 2.30; too many ranks on a GPU hang")),
    "GLOO_SOCKET_IFNAME": ("gloo", _gloo_interface),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("nccl", _error_handling),
    "TORCH_NCCL_BLOCKING_WAIT": (
        "nccl",
        _on("slow", "the host waits for every transfer; longring limits waits itself"),
    ),
    "TORCH_NCCL_AVOID_RECORD_STREAMS": ("nccl", _any_value("note", "ignored since torch 2.8")),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("nccl", _one_queue),
    "CUDA_LAUNCH_BLOCKING": ("nccl", _on("slow", "every launch waits for its kernel, and nothing overlaps")),
    "OMP_NUM_THREADS": ("gloo", _threads),
}
