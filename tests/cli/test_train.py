"""The real command in processes of its own: started, stopped, killed, restarted, and told what it may not be told."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SMALL = ("--context", "48", "--dim", "16", "--layers", "1", "--heads", "2", "--device", "cpu", "--timeout", "60")
LONG = ("--steps", "100", "--save-every", "20")
COMMAND = (sys.executable, "-m", "longring", "train")


def environment():
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**inherited, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


def longring(*arguments, before=COMMAND):
    command = [str(word) for word in (*before, *arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment())


@contextmanager
def started(*arguments, before=COMMAND):
    """The command, which is gone when the block is left."""
    command = [str(word) for word in (*before, *arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = subprocess.Popen(command, env=environment(), start_new_session=True, **pipes)
    try:
        yield running
    finally:
        if running.poll() is None:
            ranks = children(running.pid)  # of torchrun, which gives each a session of its own
            os.killpg(running.pid, signal.SIGKILL)
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
        running.communicate()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "words"
    folder.mkdir()
    draw = random.Random(0)
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(" ".join(draw.choices(["ring", "token", "rank", "key"], k=40)))
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The losses of a run on two ranks that nobody stopped."""
    out = tmp_path_factory.mktemp("whole")
    done = longring("--data", data, "--ranks", 2, "--out", out, *SMALL, *LONG)
    assert done.returncode == 0, done.stderr
    return done, out


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    return [line["loss"] for line in steps]


def wait_for_steps(out: Path, running: subprocess.Popen, count: int) -> None:
    end = time.monotonic() + 90
    path = out / "metrics.jsonl"
    while not path.exists() or path.read_text().count('"step"') < count:
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def children(process: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid, parent in map(str.split, listed.splitlines()) if int(parent) == process]


# -------------------------------------------------------------------------------------------------------- a run


def test_a_run_says_what_it_did_and_leaves_it_in_a_folder(whole):
    done, out = whole
    assert done.stderr == ""
    assert "words: 20 documents" in done.stdout
    assert "1 ring of 2 ranks, sequences of 48 tokens" in done.stdout
    assert "step 100 of 100: loss " in done.stdout
    assert "% was attention and " in done.stdout
    assert f"picture: {out / 'loss.png'}" in done.stdout
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert json.loads((out / "config.json").read_text())["ranks"] == 2
    assert sorted(path.name for path in out.glob("step-*")) == ["step-00000060", "step-00000080", "step-00000100"]
    found = losses(out)
    assert len(found) == 100
    assert found[-1] < found[0] - 1


def test_every_step_is_a_line_with_where_its_time_went(whole):
    lines = [json.loads(line) for line in (whole[1] / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["run"]["config"]["context"] == 48
    for line in lines[1:]:
        assert line["tokens"] == 48
        assert line["tokens_per_second"] == pytest.approx(48 / line["seconds"])
        assert 0 < line["attention_seconds"] < line["seconds"]
        assert line["communication_seconds"] > 0
        assert line["gradient_norm"] > 0
        assert 0 < line["learning_rate"] <= 1e-3


# ------------------------------------------------------------------------------------------------- asked to stop


IN_A_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever these tests were started with
terminal = os.open(sys.argv[1], os.O_RDWR)
for number in range(3):
    os.dup2(terminal, number)
os.execv(sys.argv[2], sys.argv[2:])
"""


@contextmanager
def terminal():
    """(what opens it, a switch that closes it); what is written there is read, or the writer would wait."""
    master, slave = os.openpty()
    name, is_closing = os.ttyname(slave), threading.Event()

    def read():
        while not is_closing.is_set():
            if select.select([master], [], [], 0.02)[0]:
                with suppress(OSError):  # nobody has it open
                    os.read(master, 4096)
        os.close(master)

    reader = threading.Thread(target=read)
    reader.start()

    def close():
        is_closing.set()
        reader.join()

    try:
        yield (sys.executable, "-c", IN_A_TERMINAL, name), close
    finally:
        close()
        os.close(slave)


def test_a_terminal_that_is_closed_lets_it_save(data, tmp_path):
    """What leads a session takes the terminal that it opens first for its own, and hears of its end."""
    words = ("--data", data, "--ranks", 2, "--out", tmp_path, *SMALL, "--steps", 10_000, "--save-every", 10_000)
    with terminal() as (opened, close), started(*words, before=(*opened, *COMMAND)) as running:
        wait_for_steps(tmp_path, running, 3)
        close()
        running.wait(60)
    assert running.returncode == 0
    (saved,) = tmp_path.glob("step-*")
    assert int(saved.name.removeprefix("step-")) == len(losses(tmp_path)) >= 3


def sigterm(running):
    running.send_signal(signal.SIGTERM)


def ctrl_c(running):
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: every process hears it


@pytest.mark.parametrize("stop", [sigterm, pytest.param(ctrl_c, marks=pytest.mark.slow)])
def test_asked_to_stop_it_saves_and_ends_well_and_goes_on_bit_by_bit(whole, data, tmp_path, stop):
    arguments = ("--data", data, "--ranks", 2, "--out", tmp_path, *SMALL, *LONG)
    with started(*arguments) as running:
        wait_for_steps(tmp_path, running, 3)
        stop(running)
        printed, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (0, "")
    done = len(losses(tmp_path))
    assert 3 <= done < 100
    assert f"Stopped as asked, and saved: {tmp_path / f'step-{done:08}'}. The same command goes on." in printed
    again = longring(*arguments)
    assert again.returncode == 0, again.stderr
    assert f"resumed from step {done} in {tmp_path}, which 2 ranks had saved" in again.stdout
    assert losses(tmp_path) == losses(whole[1])


# --------------------------------------------------------------------------------------------------- a lost rank


def test_a_killed_rank_is_named_and_the_next_start_goes_on(whole, data, tmp_path):
    arguments = ("--data", data, "--ranks", 2, "--out", tmp_path, *SMALL, *LONG)
    with started(*arguments) as running:
        wait_for_steps(tmp_path, running, 25)
        (ranks,) = [found for child in children(running.pid) if len(found := children(child)) == 2]
        os.kill(max(ranks), signal.SIGKILL)
        out, said = running.communicate(timeout=60)
    assert (running.returncode, out) == (1, "")
    assert said.startswith("error: rank ")
    assert "of 2 was killed by SIGKILL" in said
    assert said.count("\n") == 1
    again = longring(*arguments, "--json")
    assert (again.returncode, again.stderr) == (0, "")
    told = json.loads(again.stdout)
    assert list(told)[:6] == ["command", "arguments", "versions", "machine", "real", "simulated"]
    assert (told["command"], told["arguments"]["ranks"], told["arguments"]["context"]) == ("train", 2, 48)
    assert (told["steps"], told["is_stopped"], told["out"]) == (100, False, str(tmp_path))
    assert told["resumed_from"] >= 20
    assert any(note.startswith(f"resumed from step {told['resumed_from']} in ") for note in told["notes"])
    assert told["last_loss"] == losses(whole[1])[-1]
    assert 0 < told["attention_share"] < 1
    assert 0 < told["communication_share"] < 1
    assert losses(tmp_path) == losses(whole[1])


def test_torchrun_starts_it_anew_and_it_goes_on_by_itself(whole, data, tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    torchrun += ("--max-restarts", 1, "--monitor-interval", 0.1, "-m", "longring", "train")
    with started("--data", data, "--out", tmp_path, *SMALL, *LONG, before=torchrun) as running:
        wait_for_steps(tmp_path, running, 25)
        os.kill(max(children(running.pid)), signal.SIGKILL)
        out, said = running.communicate(timeout=90)
    assert running.returncode == 0, said
    assert "resumed from step " in out
    assert "step 100 of 100" in out
    assert losses(tmp_path) == losses(whole[1])


def test_other_ranks_go_on_with_the_batch_of_before_unless_one_is_named(data, tmp_path):
    arguments = ("--data", data, "--context-ranks", 1, "--out", tmp_path, *SMALL, "--json")
    ends = [("--ranks", 2, "--steps", 2), ("--ranks", 1, "--steps", 3), ("--ranks", 1, "--steps", 4, "--batch", 1)]
    runs = [longring(*arguments, *end) for end in ends]
    assert [done.stderr for done in runs] == ["", "", ""]
    told = [json.loads(done.stdout) for done in runs]
    assert [one["arguments"]["batch"] for one in told] == [2, 2, 1]
    assert ["--batch 1" in " ".join(one["notes"]) for one in told] == [False, True, False]


# --------------------------------------------------------------------------------- checkpoints that cannot be used


def test_a_run_whose_checkpoints_are_all_damaged_ends_with_exit_code_1_unless_told(whole, data, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole[1], out)
    for place in out.glob("step-*"):
        (place / ".metadata").write_bytes(b"")
    words = ("--data", data, "--ranks", 2, *SMALL, "--steps", 3)
    refused = longring(*words, "--out", out)
    assert (refused.returncode, refused.stdout.count("skipped step-")) == (1, 3)
    assert refused.stderr.startswith(f"error: --out {out} has 3 checkpoints, and none is whole: step-00000100: ")
    assert refused.stderr.endswith("or say --restart-if-damaged to begin at step 1\n")
    assert refused.stderr.count("\n") == 1
    (tmp_path / "run.toml").write_text("restart_if_damaged = true\n")
    again = longring(*words, "--out", out, "--config", tmp_path / "run.toml")
    assert (again.returncode, again.stderr) == (0, "")
    assert "begins again at step 1, as --restart-if-damaged says" in again.stdout
    assert len(losses(out)) == 3


def test_a_forged_checkpoint_is_one_line_and_an_exit_code(whole, data, tmp_path):
    """Of a model that is not there: 1. Of another program: 2."""
    words, forged = ("--data", data, "--ranks", 1, *SMALL, "--steps", 3), tmp_path / "forged"
    shutil.copytree(whole[1], forged)
    (newest,) = forged.glob("step-00000100")
    changed_about(newest, vocabulary=2**31)
    judged = longring("eval", forged, "--device", "cpu", "--ranks", 1, before=COMMAND[:-1])
    assert judged.returncode == 1
    assert re.fullmatch(r"error: \S+ says that its model has [\d,]+ weights and more, .* bytes\n", judged.stderr)
    changed_about(newest, vocabulary=257, config={**json.loads((forged / "config.json").read_text()), "layers": 10_000})
    judged = longring("eval", forged, "--device", "cpu", "--ranks", 1, before=COMMAND[:-1])
    assert judged.returncode == 1
    assert re.fullmatch(r"error: \S+ says that its model has 10,000 layers, but its index .* them\n", judged.stderr)
    changed_about(newest, config=None)
    done = longring(*words, "--out", forged)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {newest} was written by another version of longring, or by another ")
    assert done.stderr.endswith("it has no config\n")
    assert done.stderr.count("\n") == 1


def changed_about(place: Path, **changes) -> None:
    """Rightly signed."""
    told = json.loads((place / "manifest.json").read_bytes())
    text = json.dumps(told | {"about": told["about"] | changes}).encode()
    (place / "manifest.json").write_bytes(text)
    (place / "manifest.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")


# ------------------------------------------------------------------------------------------------------ the plan


def test_a_dry_run_tells_memory_bytes_and_time_and_starts_nothing(data, tmp_path):
    out = tmp_path / "never"
    arguments = ("--data", data, "--ranks", 4, "--context-ranks", 2, "--context", "64K", "--out", out, "--dry-run")
    done = longring(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("2 rings of 2 ranks", "weights", "optimiser", "attention", "logits", "Predicted; nothing was run."):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines()[4:-1])) <= 80
    assert not out.exists()


def test_a_dry_run_in_json_has_the_parts_and_their_sums(data, tmp_path):
    done = longring("--data", data, "--ranks", 2, "--fsdp", "--activation-checkpointing", "--dry-run", "--json")
    told = json.loads(done.stdout)
    found = told["outlook"]
    assert told["arguments"]["fsdp"]
    assert found["memory_bytes"] == sum(found["memory"].values())
    assert found["memory"]["weights"] == 4 * -(-found["parameters"] // 2)
    assert found["bytes_sent"] == sum(found["sent"].values())
    assert found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert found["run_seconds"] == pytest.approx(100 * found["step_seconds"])


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--context", "1"), "error: --context must be a whole number from 2"),
        (("--model", "gpt"), "error: --model must be one of decoder, longnet; got 'gpt'"),
        (("--ranks", "4", "--context-ranks", "3"), "error: --context-ranks must divide the ranks, got 3 of 4"),
        (("--config", "nowhere.toml"), "error: --config nowhere.toml cannot be read"),
        (("--data", "nowhere", "--ranks", "1"), "nowhere"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, said, tmp_path):
    done = longring(*arguments, "--out", tmp_path / "out", "--device", "cpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_world_of_another_size_than_asked_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules[__name__], "environment", lambda: {**os.environ, "RANK": "0", "WORLD_SIZE": "8"})
    done = longring("--ranks", 4, "--out", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: --ranks 4, but this world was started with 8; leave --ranks out\n"
