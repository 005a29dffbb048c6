"""`longring doctor`: as a user runs it, and on machines that this one is not."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from choices import forget_choices
from longring.bench import doctor
from longring.bench.doctor import advice, devices, network, nvidia, transports
from longring.bench.doctor.devices import Gpu, Links
from longring.bench.doctor.kernels import kernels_on
from longring.cli import main
from longring.cli.doctor import _kernel_lines, _print_page, _self_tests, screen
from longring.kernels.recipes import _generation
from longring.testing import self_test

QUESTIONS = [question.name for question in self_test.QUESTIONS]


def run(*arguments, **environment):
    command = [sys.executable, "-m", "longring", "doctor", *arguments]
    inherited = {name: value for name, value in os.environ.items() if name not in advice.set_variables(os.environ)}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env={**inherited, "NO_COLOR": "1", **environment},
    )


@pytest.fixture(scope="module")
def printed():
    return run()


@pytest.fixture(scope="module")
def told():
    done = run("--no-self-test", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


# ------------------------------------------------------------------------------------------------ as it is


@pytest.mark.processes
def test_all_is_well_here(printed):
    assert (printed.returncode, printed.stderr) == (0, "")
    assert printed.stdout.splitlines()[-1].startswith("All is well")
    for section in ("Software", "Devices", "Kernels on cpu", "Between ranks", "Network", "Environment", "Self-test"):
        assert f"\n{section}" in printed.stdout


@pytest.mark.processes
def test_every_question_of_the_self_test_is_answered_right(printed):
    for question in QUESTIONS:
        (line,) = (line for line in printed.stdout.splitlines() if f" {question}: " in line)
        assert line.split()[0] == "right"
        assert 0 < int(line.partition(f"{question}: ")[2].partition("%")[0]) <= 100


@pytest.mark.processes
def test_the_page_is_plain_and_keeps_to_its_width(printed):
    assert "\x1b" not in printed.stdout
    for line in printed.stdout.splitlines():
        assert line == line.rstrip()
        assert len(line) <= 100


def test_json_has_all_that_was_found(told):
    assert (told["command"], told["ok"], told["self_tests"]) == ("doctor", True, [])
    assert told["verdict"] == "All is well. No self-test was run."
    found = told["found"]
    assert found["software"]["packages"]["torch"] == torch.__version__
    assert set(found["software"]["cuda"]) == {"CUDA", "ROCm", "cuDNN", "NCCL", "NVIDIA driver"}
    assert found["cpu"]["cores"] >= 1
    assert found["kernels"][0]["device"] == "cpu"
    assert {way["name"] for way in found["transports"]} == {"gloo", "nccl", "symmetric", "staged"}
    assert {each["name"] for each in found["network"]["interfaces"]} == {name for _, name in socket.if_nameindex()}


def test_on_the_cpu_one_kernel_computes_all_and_the_others_say_why_not():
    found = kernels_on("cpu")
    assert found.only == "cpu_flash"
    (reason,) = found.refusals
    assert set(found.refusals[reason]) == {
        *("flash_attn_4", "flash_attn_3", "flash_attn_2", "cudnn", "flash", "efficient", "triton")
    }


# ------------------------------------------------------------------------------------------------ environments


def test_an_interface_that_is_not_there_is_wrong():
    done = run("--no-self-test", GLOO_SOCKET_IFNAME="nowhere0")
    assert (done.returncode, done.stderr) == (1, "")
    assert "Wrong: it will fail or hang" in done.stdout
    assert "this machine has no interface nowhere0" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1] == "NOT well: 1 setting will fail or hang, see above."


@pytest.mark.processes
def test_and_the_self_test_fails_on_it_and_says_so():
    done = run("--json", "--timeout", "20", GLOO_SOCKET_IFNAME="nowhere0")
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"], done.stderr.count("Traceback")) == (1, False, 0)
    tested, *_ = told["self_tests"]
    assert (tested["ok"], tested["questions"]) == (False, [])
    assert tested["failure"].startswith("rank ")
    assert told["verdict"].startswith("NOT well: the self-test failed on cpu, and 1 setting")


def test_a_transport_that_does_not_exist_is_wrong():
    done = run("--no-self-test", "--json", LONGRING_TRANSPORT="pigeon")
    concern, *_ = json.loads(done.stdout)["found"]["concerns"]
    assert done.returncode == 1
    assert (concern["level"], concern["name"]) == ("wrong", "LONGRING_TRANSPORT")
    assert "pigeon" in concern["text"]


def test_what_is_slow_is_said_and_no_fault(monkeypatch):
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "4096", "LONGRING_DEBUG": "1"})
    found = doctor.diagnose()
    assert found.environment == {"OMP_NUM_THREADS": "4096", "LONGRING_DEBUG": "1"}
    said = {concern.name: concern.level for concern in found.concerns}
    assert (said["OMP_NUM_THREADS"], said["LONGRING_DEBUG"], "wrong" in said.values()) == ("slow", "slow", False)


@pytest.mark.parametrize(("address", "leads"), [(None, "leads nowhere"), ("127.0.1.1", "leads to 127.0.1.1")])
def test_a_name_that_leads_to_no_other_machine_is_wrong_for_several(address, leads, monkeypatch):
    monkeypatch.setattr(network, "_address_of", lambda host: address)
    monkeypatch.setattr(os, "environ", {})
    assert leads not in str(doctor.diagnose().concerns)
    wrong = [concern for concern in doctor.diagnose(nodes=2).concerns if concern.level == "wrong"]
    assert [leads in concern.text for concern in wrong] == [True]
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "eth0"})
    assert leads not in str(doctor.diagnose(nodes=2).concerns)


def test_a_resolver_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(network, "PATIENCE", 0.05)
    monkeypatch.setattr(socket, "gethostbyname", lambda host: time.sleep(5))
    assert network._address_of("slow") is None


# ------------------------------------------------------------------------------------------------ other machines


def two_gpus(*, direct=True, free=140 << 30):
    gpus = tuple(Gpu(index, "NVIDIA H200", (9, 0), "hopper", 132, 141 << 30, free) for index in range(2))
    return gpus, Links(((True, direct), (direct, True)), "GPU0 GPU1\nGPU0 X NV18")


@pytest.fixture
def on_gpu(monkeypatch):
    """Kernels on a GPU that is not there, by its compute capability: shapes alone, nothing is computed."""
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr("longring.kernels.operations.triton.is_available", lambda device: True)
    monkeypatch.setattr("longring.kernels.recipes._generation", _generation.__wrapped__)  # which remembers

    def found(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        return kernels_on("cuda:0")

    forget_choices()
    with FakeTensorMode():
        yield found
    forget_choices()  # a GPU that is there may choose otherwise


@pytest.fixture
def hopper(on_gpu):
    return on_gpu(9, 0)


def test_on_a_gpu_the_table_chooses_by_shape_and_each_refusal_names_its_shapes(hopper):
    lines = dict(_kernel_lines(hopper))
    assert lines["bfloat16, d 128"].startswith("dense: cudnn; window: cudnn; dilated: cudnn")
    assert lines["float32, d 128"].startswith("dense: efficient")
    assert lines["float64, d 128"].startswith("dense: reference")
    assert "triton (bfloat16, d 64), reference (float64, d 128)" in lines["deterministic"]
    refused = [text for name, text in _kernel_lines(hopper) if name == "refused"]
    assert any(text.startswith("flash_attn_4: needs the package flash-attn-4") for text in refused)
    assert any(text.startswith("cudnn, flash: ") and text.endswith("[float32, d 128]") for text in refused)
    shares = hopper.taken[1].forward["dilated"]
    assert sum(shares.values()) == pytest.approx(1)


def test_an_older_gpu_chooses_otherwise(on_gpu):
    assert dict(_kernel_lines(on_gpu(8, 0)))["bfloat16, d 128"].startswith("dense: flash; window: flash")


def test_a_gpu_older_than_all_fused_kernels_of_16_bits(on_gpu):
    lines = dict(_kernel_lines(on_gpu(7, 0)))
    assert lines["bfloat16, d 128"].startswith("dense: reference")
    assert lines["float32, d 128"].startswith("dense: efficient")


@pytest.fixture
def with_gpus(hopper, monkeypatch):
    """The diagnosis of a machine with two GPUs, some of it as given."""
    found = doctor.diagnose()

    def made(**given):
        gpus, links = two_gpus(**given)
        on = dataclasses.replace(found.software, cuda={**found.software.cuda, "NCCL": "2.22.3"})
        kernels = (*found.kernels, hopper)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        monkeypatch.setattr(transports.driver, "obstacle", lambda: None)
        seen = dataclasses.replace(
            found,
            gpus=gpus,
            no_gpu=None,
            links=links,
            software=on,
            kernels=kernels,
            transports=transports.ways(2),
            concerns=(),
        )
        concerns = tuple(advice.concerns_of(seen, nodes=1, ranks_here=2))
        return dataclasses.replace(seen, concerns=concerns)

    return made


def test_a_page_with_gpus(with_gpus, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", {"NCCL_P2P_DISABLE": "1", "NO_COLOR": "1"})
    _print_page(screen.console(), with_gpus(), [])
    page = " ".join(capsys.readouterr().out.split())
    assert "GPU 1 NVIDIA H200, compute capability 9.0 (hopper), 132 multiprocessors, 141 GiB of memory" in page
    assert "all reach each other's memory; nvidia-smi draws the topology below" in page
    assert "GPU0 X NV18" in page
    assert "nccl CUDA tensors, over NVLink, PCI or the network: in groups that have it" in page
    assert "NCCL_P2P_DISABLE=1: blocks go through host memory" in page
    assert "flash_attn_4 needs the package flash-attn-4" in page
    assert "NCCL is 2.22.3; from 2.26 on" in page
    assert page.endswith("All is well; see above what could be better. No self-test was run.")


def test_gpus_that_do_not_reach_each_other_or_are_busy(with_gpus):
    names = [concern.name for concern in with_gpus(direct=False, free=10 << 30).concerns]
    assert names.count("P2P") == 1
    assert names.count("GPU") == 2
    assert "P2P" not in [concern.name for concern in with_gpus().concerns]


@pytest.mark.parametrize(
    ("setting", "taken"),
    [
        ("", {"gloo", "nccl", "symmetric", "staged"}),
        ("symmetric", {"gloo", "symmetric", "staged"}),
        ("staged", {"gloo", "nccl", "staged"}),
    ],
)
def test_ways_that_are_taken_with_gpus(setting, taken, with_gpus, monkeypatch):
    monkeypatch.setenv("LONGRING_TRANSPORT", setting)
    assert {way.name for way in with_gpus().transports if way.taken} == taken


def test_gpus_are_read_from_torch(monkeypatch):
    properties = SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30)
    for name, answer in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda index: properties,
        "mem_get_info": lambda index: (100, 200),
        "can_device_access_peer": lambda i, j: i < j,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(devices, "ask_nvidia", lambda *arguments: None)
    found, none = devices.read_gpus()
    assert none is None
    assert found[1] == Gpu(1, "H200", (9, 0), "hopper", 132, 141 << 30, 100)
    assert devices.read_links(found) == Links(((True, True), (False, True)), None)
    assert devices.read_links(found).apart == [(1, 0)]
    assert devices.read_links(found[:1]) is None


def test_a_gpu_that_fails_ends_no_diagnosis(monkeypatch):
    def lost(index):
        raise RuntimeError("CUDA error: device is lost\nmore of it")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lost)
    monkeypatch.setattr(advice, "gpu_names", lambda: ["NVIDIA H200"])
    found = doctor.diagnose()
    assert (found.gpus, found.no_gpu) == ((), "torch fails on it: CUDA error: device is lost")
    assert [concern.level for concern in found.concerns if concern.name == "GPU"] == ["wrong"]


def test_a_gpu_that_this_torch_cannot_use_is_mentioned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(advice, "gpu_names", lambda: ["NVIDIA H200"])
    (concern,) = (concern for concern in doctor.diagnose().concerns if concern.name == "GPU")
    assert concern.level == "slow"
    assert "built without CUDA; install one with CUDA" in concern.text


def test_nvidia_smi_that_is_absent_fails_or_hangs(monkeypatch):
    monkeypatch.setattr(nvidia.shutil, "which", lambda name: None)
    assert nvidia.ask_nvidia("topo", "-m") is None
    monkeypatch.setattr(nvidia.shutil, "which", lambda name: name)
    for failure in (FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 1)):

        def fail(*given, failure=failure, **options):
            raise failure

        monkeypatch.setattr(nvidia.subprocess, "run", fail)
        assert nvidia.ask_nvidia("topo", "-m") is None
        assert nvidia.gpu_names() == []
    monkeypatch.setattr(nvidia.subprocess, "run", lambda *given, **options: SimpleNamespace(stdout="A\nB\n"))
    assert (nvidia.gpu_names(), nvidia.ask_nvidia("x", lines=1)) == (["A", "B"], "A")


# ------------------------------------------------------------------------------------------------ the self-test


def is_killed(device, timeout):
    """In place of what a process does: rank 1 is killed, the other waits for it."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return self_test._answers(device, timeout)


def hangs(device, timeout):
    time.sleep(100)


def is_a_little_wrong(device, timeout):
    said = self_test._answers(device, timeout)
    answer = said[0].answer
    return [said[0]._replace(answer=answer._replace(dk=answer.dk * 1.001)), *said[1:]]


def instead(monkeypatch, program):
    """Launch another program; the real one is found by its own name where that calls it."""
    real = self_test.launch
    monkeypatch.setattr(self_test, "launch", lambda _, *given, **options: real(program, *given, **options))


def test_where_there_are_gpus_they_are_tested_too_and_have_time_to_compile(with_gpus, monkeypatch):
    asked = []
    monkeypatch.setattr(self_test, "self_test", lambda device, timeout: asked.append((device, timeout)))
    _self_tests(with_gpus(), None)
    _self_tests(with_gpus(), 7.0)
    assert asked == [("cpu", 30.0), ("cuda", 120.0), ("cpu", 7.0), ("cuda", 7.0)]


@pytest.mark.processes
def test_a_killed_rank_fails_the_self_test(monkeypatch):
    instead(monkeypatch, is_killed)
    outcome = self_test.self_test()
    assert (outcome.ok, outcome.judged) == (False, ())
    assert "rank 1 of 2 was killed by SIGKILL" in outcome.failure


@pytest.mark.processes
def test_a_silent_rank_fails_the_self_test_in_time(monkeypatch):
    instead(monkeypatch, hangs)
    outcome = self_test.self_test(timeout=5)
    assert "had not ended after 5 s, the timeout" in outcome.failure


@pytest.mark.processes
def test_a_wrong_gradient_fails_the_self_test_and_the_command(monkeypatch, capsys):
    instead(monkeypatch, is_a_little_wrong)
    monkeypatch.setattr(sys, "argv", ["longring", "doctor"])
    with pytest.raises(SystemExit) as stopped:
        main()
    page = capsys.readouterr().out
    assert stopped.value.code == 1
    assert "WRONG             causal: relative error of dk 1.0e-03, allowed " in page
    assert page.count("  right  ") == len(QUESTIONS) - 1
    assert "NOT well: the self-test failed on cpu" in page


def test_under_torchrun_it_starts_no_ranks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["longring", "doctor"])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr().err
    assert (stopped.value.code, said.count("\n"), "--no-self-test" in said) == (2, 1, True)


@pytest.mark.parametrize("arguments", [("--nodes", "0"), ("--ranks", "x"), ("--timeout", "0")])
def test_bad_arguments_are_one_line_that_names_them(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["longring", "doctor", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr().err
    assert (stopped.value.code, said.count("\n"), arguments[0] in said) == (2, 1, True)
