"""Several machines, played by network namespaces: the examples by torchrun, and a machine that is cut off."""

import importlib.util
import json
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


namespaces = _load(ROOT / "benchmarks" / "namespaces.py")
LIMIT = 100  # seconds


@pytest.fixture(autouse=True)
def machines_can_be_played():
    reason = namespaces.why_not()
    if reason is not None:
        pytest.skip(reason)


def names_of_namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def torchrun(example, machine, first):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    meeting = ["--node-rank", str(machine.number), "--master-addr", first.address]
    return [*torchrun, *meeting, str(ROOT / "examples" / example)]


@contextmanager
def everywhere(made, command_of, environment_of=lambda machine: {}):
    """A process on every machine, none of which is left."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [machine.start(command_of(machine), environment_of(machine), **pipes) for machine in made]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate(timeout=LIMIT)


def said_by_all(example):
    """What two machines print together."""
    with (
        namespaces.machines(2) as made,
        everywhere(made, lambda machine: torchrun(example, machine, made[0])) as running,
    ):
        outputs = [process.communicate(timeout=LIMIT) for process in running]
        assert [process.returncode for process in running] == [0, 0], outputs
        return "".join(out for out, _ in outputs)


def test_nothing_is_left_behind():
    before = names_of_namespaces()
    with namespaces.machines(2, rate="10mbit") as made:
        sleeper = made[1].start(["sleep", "600"], {})
        assert len(names_of_namespaces() - before) == 3  # the switch is one, too
    assert sleeper.wait(10) == -9
    assert names_of_namespaces() == before


def test_a_ring_over_two_machines_is_exact():
    text = said_by_all("ring.py")
    found = re.findall(r"one process (\S+)$", text, re.MULTILINE)
    assert "2001 tokens on 4 ranks" in text
    assert len(found) == 4
    assert max(map(float, found)) < 1e-5


def test_rings_beside_each_other_over_two_machines_are_exact():
    text = said_by_all("mesh.py")
    assert sorted(re.findall(r"sequence (\d), rank (\d)", text)) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert max(map(float, re.findall(r"one process (\S+)$", text, re.MULTILINE))) < 1e-5


TIMEOUT = 3.0
CUT_OFF = f"""
import json, sys, time
import torch, torch.distributed as dist
import longring as lr

dist.init_process_group("gloo")
group = dist.group.WORLD
q, k, v = torch.randn(3, 1, 600, 2, 16).requires_grad_().unbind(0)
s = lr.Sharding(length=600 * dist.get_world_size(), group=group, layout="contiguous")
calls = 0
try:
    while True:
        lr.ring_attention(q, k, v, sharding=s, timeout={TIMEOUT}).sum().backward()
        calls += 1
        if calls == 3:
            print("going", flush=True)
except lr.PeerLost as error:
    print(json.dumps([time.time(), error.rank, str(error)]), flush=True)
"""


@pytest.mark.parametrize("victim", [2, 0], ids=["a peer", "the store's host"])
def test_a_machine_that_is_cut_off_is_missed(victim):
    with namespaces.machines(3) as made:
        world = {"MASTER_ADDR": made[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
        program = [sys.executable, "-c", CUT_OFF]
        with everywhere(made, lambda _: program, lambda machine: world | {"RANK": str(machine.number)}) as running:
            assert [process.stdout.readline() for process in running] == ["going\n"] * 3
            made[victim].unplug()
            cut = time.time()
            for process in (process for number, process in enumerate(running) if number != victim):
                out, err = process.communicate(timeout=TIMEOUT + 20)
                assert process.returncode == 0, err
                raised, suspect, text = json.loads(out)
                assert raised - cut < TIMEOUT + 5, text
                assert suspect == victim, text
