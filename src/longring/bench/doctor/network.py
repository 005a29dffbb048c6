"""Network interfaces, and where this machine's name leads."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/class")
PATIENCE = 2.0  # seconds for the host's name: a resolver without a network may take a minute
_ASK_FOR_ADDRESS = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class Interface:
    name: str
    is_up: bool | None  # None: not known here
    address: str | None  # IPv4
    megabits: int | None  # per second, where the driver tells

    @property
    def is_loopback(self) -> bool:
        return self.name in ("lo", "lo0")


@dataclass(frozen=True)
class Adapter:
    """Of InfiniBand or RoCE, by port."""

    name: str
    port: str
    state: str
    rate: str


@dataclass(frozen=True)
class Network:
    host: str
    host_address: str | None  # None: the name leads nowhere
    interfaces: tuple[Interface, ...]
    adapters: tuple[Adapter, ...]


def read_network() -> Network:
    host = socket.gethostname()
    names = sorted(name for _, name in socket.if_nameindex())
    return Network(host, _address_of(host), tuple(map(_interface, names)), tuple(_adapters()))


def _address_of(host: str) -> str | None:
    found: list[str] = []

    def look() -> None:
        with contextlib.suppress(OSError):
            found.append(socket.gethostbyname(host))

    thread = threading.Thread(target=look, name="longring looks up the host", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found[0] if found else None


def _interface(name: str) -> Interface:
    place = SYSTEM / "net" / name
    state, speed = _read(place / "operstate"), _read(place / "speed")
    is_up = None if state is None else state in ("up", "unknown")  # loopback and some drivers do not know
    megabits = int(speed) if speed is not None and speed.isdecimal() and int(speed) else None
    return Interface(name, is_up, _address(name), megabits)


def _address(name: str) -> str | None:
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), _ASK_FOR_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])


def _adapters() -> list[Adapter]:
    ports = sorted((SYSTEM / "infiniband").glob("*/ports/*"))
    return [
        Adapter(port.parent.parent.name, port.name, _read(port / "state") or "?", _read(port / "rate") or "?")
        for port in ports
    ]


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # not Linux, or a driver that does not tell
        return None
