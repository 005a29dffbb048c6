"""`longring eval` in processes of its own: what it prints and leaves, what it refuses, and how it joins a world."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

SMALL = ("--context", "96", "--dim", "16", "--layers", "1", "--heads", "2", "--device", "cpu", "--timeout", "60")
PYTHON = (sys.executable, "-m", "longring")


def longring(*arguments, before=PYTHON, cwd=None):
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [str(word) for word in (*before, *arguments)],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=cwd,
        env={**inherited, "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run on words, of bytes."""
    folder = tmp_path_factory.mktemp("data") / "words"
    folder.mkdir()
    draw = random.Random(0)
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(" ".join(draw.choices(["ring", "token", "rank", "key"], k=40)))
    out = tmp_path_factory.mktemp("run")
    done = longring("train", "--data", folder, "--ranks", 2, "--out", out, *SMALL, "--steps", 30)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def record(run, tmp_path_factory):
    """By two ranks, in JSON."""
    path = tmp_path_factory.mktemp("record") / "eval.json"
    done = longring("eval", run, "--ranks", 2, "--device", "cpu", "--window", 16, "--json", "--out", path)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert json.loads(path.read_text()) == told
    return told


def test_json_has_the_buckets_and_where_they_come_from(run, record):
    assert list(record)[:6] == ["command", "arguments", "versions", "machine", "real", "simulated"]
    assert (record["command"], record["arguments"]["checkpoint"], record["arguments"]["ranks"]) == ("eval", str(run), 2)
    assert (record["subject"]["step"], record["subject"]["saved_by_ranks"]) == (30, 2)
    assert (record["context"], record["window"], record["split"]) == (96, 16, "held-out")
    assert [bucket["least"] for bucket in record["buckets"]] == [1, 2, 3, 5, 9, 17, 33, 65]
    for bucket in record["buckets"]:
        assert bucket["loss"] > 0
        assert bucket["perplexity"] > 1
    near, far = record["buckets"][2], record["buckets"][-1]
    assert near["gain"] == pytest.approx(0, abs=1e-6)
    assert far["gain"] != 0
    assert record["beyond"]["least"] == 17
    assert record["everything"]["tokens"] == sum(bucket["tokens"] for bucket in record["buckets"])


def test_a_table_says_the_same_as_the_record_on_other_ranks_of_a_world_that_was_started(run, record):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3, "-m", "longring")
    done = longring("eval", run, "--device", "cpu", "--window", 16, before=torchrun)
    assert done.returncode == 0, done.stderr
    assert f"step 30 in {run}, on 1 ring of 3 ranks" in done.stdout
    assert "held-out part of words: 40 documents" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    far = record["buckets"][-1]
    row = next(words for words in rows if words[:3] == ["65", "to", "96"])
    assert row[3] == f"{far['tokens']:,}"
    assert float(row[4]) == pytest.approx(far["loss"], abs=1e-4)
    assert float(row[8]) == pytest.approx(far["gain"], abs=2e-4)
    assert "What lies beyond 16 tokens " in done.stdout
    assert max(map(len, done.stdout.splitlines()[2:])) <= 100


def test_data_that_changed_or_is_gone_is_told(tmp_path):
    """And data that was named by a relative path is found from elsewhere, without the run that lies in it."""
    data = tmp_path / "words"
    data.mkdir()
    for number in range(20):
        (data / f"{number:02}.txt").write_text("ring token rank key " * 10)
    words = ("--data", os.path.relpath(data), "--ranks", 1, "--out", data / "run", *SMALL, "--steps", 2)
    done = longring("train", *words)
    assert done.returncode == 0, done.stderr
    (data / "run" / "lock").unlink()
    question = ("eval", data / "run", "--ranks", 1, "--device", "cpu", "--sequences", 1)
    done = longring(*question, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["notes"] == []
    (data / "new.txt").write_text("ring " * 20)
    note = "words has changed since the run was trained on it: it may have seen some of what is held out now"
    assert json.loads(longring(*question, "--json").stdout)["notes"] == [note]
    assert note in longring(*question).stdout.splitlines()
    assert note not in longring(*question, "--data", data).stdout
    data.rename(tmp_path / "moved")
    done = longring("eval", tmp_path / "moved" / "run", *question[2:])
    assert done.returncode == 2
    assert done.stderr == f"error: the run's own --data, {data}, is not there; say where it is, by --data PATH\n"


def test_keys_are_asked_for_at_each_depth(run):
    done = longring(
        *("eval", run, "--passkey", "--depths", "0,0.5,1", "--trials", 3, "--batch", 4),
        *("--ranks", 1, "--device", "cpu", "--context", 120),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Held-out keys of 5 digits, in texts of 120 tokens" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows if row[3:4] == ["3"]] == ["0", "0.5", "1"]
    assert "of 9 keys found" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--passkey", "--window", "8"), "error: --window is for perplexity; leave one of them out"),
        (("--trials", "8"), "error: --trials is for --passkey; leave one of them out"),
        (("--passkey", "--depths", "0,2"), "error: --depths takes numbers from 0 to 1 with commas between"),
        (("--passkey", "--depths", "deep"), "error: --depths takes numbers from 0 to 1 with commas between"),
        (("--passkey", "--kind", "text"), "error: --kind says what --data is; give --data, or leave it out"),
        (("--window", "1"), "error: --window must be a whole number from 2"),
        (("--split", "test", "--ranks", "1"), "error: split must be 'train' or 'held-out', got 'test'"),
        (("--ranks", "1", "--layout", "round"), "error: --layout must be one of auto, "),
        (("--ranks", "1", "--context", "1e15"), "error: --context 1,000,000,000,000,000 takes more memory than"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(run, arguments, said):
    done = longring("eval", run, *arguments, "--device", "cpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    done = longring("eval", tmp_path, "--ranks", 1, "--device", "cpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: CHECKPOINT {tmp_path} holds no complete checkpoint")
    assert done.stderr.count("\n") == 1
