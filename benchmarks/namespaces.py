"""Several machines played on one: network namespaces joined by a bridge, with links as slow as asked. Linux, as root.

python benchmarks/namespaces.py --machines 2 --rate 200mbit -- \
    torchrun --nnodes {machines} --node-rank {machine} --master-addr {first} --nproc-per-node 2 examples/ring.py

The command runs once on every machine, with {machine} its number, {machines} how many there are, and {first} the
address of machine 0. Nothing is left behind, whatever happens: links are deleted before namespaces.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

LINK = "eth0"
_numbers = itertools.count()


@dataclass(frozen=True)
class Machine:
    """A namespace with one network card, and the port of the switch that it is plugged into."""

    number: int
    namespace: str
    address: str
    switch: str

    @property
    def port(self) -> str:
        return f"port{self.number}"

    def start(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
        """Run a command on this machine."""
        surroundings = {**os.environ, "GLOO_SOCKET_IFNAME": LINK, "NCCL_SOCKET_IFNAME": f"={LINK}", **environment}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *command], env=surroundings, text=True, **options
        )

    def unplug(self) -> None:
        """Pull the cable at the switch: whatever is sent is lost, and nobody is told."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "down")


def why_not() -> str | None:
    """Why no machines can be played here, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a feature of Linux"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 not found"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    try:
        with machines(1, rate="1gbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"this kernel or container refuses: {error.stderr.strip() or error}"


@contextmanager
def machines(count: int, rate: str | None = None) -> Iterator[list[Machine]]:
    """Machines on one switch. `rate`, as tc writes it (200mbit), is what each can send."""
    name = f"longring{os.getpid()}x{next(_numbers)}"
    switch = f"{name}s"
    made = [Machine(number, f"{name}m{number}", f"10.0.0.{number + 1}", switch) for number in range(count)]
    try:
        _make_switch(switch)
        for machine in made:
            _plug_in(machine, rate)
        yield made
    finally:
        _clear_away(made, switch)


def _make_switch(switch: str) -> None:
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")


def _plug_in(machine: Machine, rate: str | None) -> None:
    here, switch = ("ip", "-n", machine.namespace), ("ip", "-n", machine.switch)
    _run("ip", "netns", "add", machine.namespace)
    peer = ("type", "veth", "peer", "name", machine.port, "mtu", "9000", "netns", machine.switch)
    _run("ip", "link", "add", LINK, "mtu", "9000", "netns", machine.namespace, *peer)
    _run(*switch, "link", "set", machine.port, "master", "bridge", "up")
    _run(*here, "address", "add", f"{machine.address}/24", "dev", LINK)
    # A link that takes 64 KB at once is not the slow link it is shaped to be.
    _run(*here, "link", "set", LINK, "gso_max_segs", "1", "up")
    _run(*here, "link", "set", "lo", "up")
    if rate is not None:
        shape = ("tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
        _run("tc", "-n", machine.namespace, "qdisc", "add", "dev", LINK, "root", *shape)


def _clear_away(made: list[Machine], switch: str) -> None:
    """What is there of it; a namespace that goes before its processes or its link can leave them behind."""
    for machine in made:
        for process in _processes(machine.namespace):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    for machine in made:
        _try("ip", "-n", machine.namespace, "link", "delete", LINK)
    for namespace in (*(machine.namespace for machine in made), switch):
        _try("ip", "netns", "delete", namespace)


def _processes(namespace: str) -> list[int]:
    """All of them are ours: nobody else knows of the namespace."""
    found = subprocess.run(["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True)
    return [int(number) for number in found.stdout.split()]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _try(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True)


def run_everywhere(command: Sequence[str], count: int, rate: str | None, timeout: float | None = None) -> list[int]:
    """Run the command on every machine at once; return the exit codes."""
    with machines(count, rate) as made:
        running = [machine.start(_filled(command, machine, made), {}) for machine in made]
        return [process.wait(timeout) for process in running]


def _filled(command: Sequence[str], machine: Machine, made: list[Machine]) -> list[str]:
    values = {"{machine}": str(machine.number), "{machines}": str(len(made)), "{first}": made[0].address}
    return [_replaced(part, values) for part in command]


def _replaced(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--rate", help="what each machine can send, as tc writes it: 200mbit; without it, no limit")
    parser.add_argument("--timeout", type=float, help="seconds")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    reason = why_not()
    if reason is not None:
        sys.exit(f"skipped: {reason}")
    try:
        sys.exit(max(map(abs, run_everywhere(asked.command, asked.machines, asked.rate, asked.timeout))))
    except subprocess.TimeoutExpired as error:
        sys.exit(f"ended: {error}")


if __name__ == "__main__":
    main()
