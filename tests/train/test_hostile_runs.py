"""Folders of runs that strangers made: links, pipes and folders where a run writes, and lines that no run writes."""

import json
import os

import pytest

from longring.cli.train import _picture
from longring.errors import ArgumentError, CheckpointError
from longring.train.checkpoints import claims
from longring.train.config import Config
from longring.train.metrics import CONFIG, LONGEST, MOST, NAME, Metrics, check, steps
from longring.train.picture import draw
from longring.train.small_files import put

KEPT = "what the user wrote\n"
RECORD = {"step": 1, "loss": 2.5, "tokens_per_second": 1.0, "learning_rate": 1e-3, "gradient_norm": 1.0}


@pytest.fixture
def theirs(tmp_path):
    """A file that is no part of the run, and the run's folder."""
    (tmp_path / "file").write_text(KEPT)
    (tmp_path / "run").mkdir()
    yield tmp_path / "file", tmp_path / "run"
    claims.release(tmp_path / "run")
    assert (tmp_path / "file").read_text() == KEPT


@pytest.mark.parametrize("what", ["link", "dangling", "pipe", "folder", "/dev/null"])
def test_a_lock_that_is_no_file_is_refused(theirs, what):
    file, run = theirs
    lock = run / claims.LOCK
    if what == "pipe":
        os.mkfifo(lock)
    elif what == "folder":
        lock.mkdir()
    else:
        lock.symlink_to({"link": file, "dangling": run / "elsewhere"}.get(what, what))
    with pytest.raises(CheckpointError, match=r"lock (cannot be opened|is a link, a pipe or a device)"):
        claims.claim(run)
    assert not (run / "elsewhere").exists()


def test_a_picture_replaces_a_link_and_leaves_what_it_leads_to(theirs):
    pytest.importorskip("matplotlib")
    file, run = theirs
    (run / "loss.png").symlink_to(file)
    assert draw([RECORD], run / "loss.png", title="it")
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (run / "loss.png").is_symlink()
    assert os.listdir(run) == ["loss.png"]


@pytest.mark.parametrize("name", [NAME, CONFIG])
@pytest.mark.parametrize("what", ["link", "dangling", "pipe", "folder", "loop", "/dev/zero"])
def test_files_of_a_run_that_are_none_are_refused(theirs, name, what):
    file, run = theirs
    path = run / name
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link": file, "dangling": run / "elsewhere", "loop": path}.get(what, what))
    with pytest.raises(ArgumentError, match=f"{name} is a folder, a link, a pipe or a device"):
        check(run)
    if name == NAME:
        for use in (steps, lambda folder: Metrics(folder, step=0, about={})):
            with pytest.raises(ArgumentError, match=f"{name} is a folder, a link, a pipe or a device"):
                use(run)
    assert not (run / "elsewhere").exists()


def test_metrics_without_end_are_refused(tmp_path):
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(MOST + 1)
    with pytest.raises(ArgumentError, match="has 1,073,741,825 bytes"):
        check(tmp_path)


def test_a_folder_named_as_a_draft_is_left(tmp_path):
    (tmp_path / ".config.json.x").mkdir()
    put(tmp_path / CONFIG, "{}")
    assert (tmp_path / CONFIG).read_text() == "{}"
    assert (tmp_path / ".config.json.x").is_dir()


def test_lines_that_no_run_writes_are_passed_over(tmp_path):
    wrong = [
        '{"step": 1}',
        '{"step": "1", "loss": 1.0}',
        '{"step": true, "loss": 1.0}',
        '{"step": 1, "loss": "1"}',
        '{"step": 1, "loss": NaN}',
        '{"step": 1, "loss": 1e999}',
        '{"step": 1, "loss": ' + "9" * 4000 + "}",
        '{"step": 1, "loss": ' + "9" * 5000 + "}",
        '{"step": ' + "9" * 4000 + ', "loss": 1.0}',
        "[" * 60_000,
        "[" * 100_000,
        '{"step": 2, "loss": 1.0, "x": "' + "x" * 2 * LONGEST + '"}',
        "x" * (LONGEST - 1) + json.dumps({"step": 2, "loss": 1.0}),
        "[]",
        "7",
        "\xff",
    ]
    (tmp_path / NAME).write_text("\n".join([*wrong, json.dumps(RECORD), *wrong]) + '\n{"step": 9, "loss": 1.0}')
    assert steps(tmp_path) == [RECORD]
    metrics = Metrics(tmp_path, step=1, about={})
    metrics.close()
    assert (tmp_path / NAME).read_text().splitlines() == [json.dumps(RECORD), '{"run": {}}']


def test_a_picture_that_cannot_be_written_is_a_note(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / NAME).write_text(json.dumps(RECORD) + "\n")
    config = Config(context=64, ranks=1)
    assert _picture(config, tmp_path) == (str(tmp_path / "loss.png"), None)
    (tmp_path / "loss.png").unlink()
    (tmp_path / "loss.png").mkdir()
    picture, why = _picture(config, tmp_path)
    assert picture is None
    assert why.startswith(f"no picture of the loss: {tmp_path}/loss.png cannot be written: ")
    assert sorted(os.listdir(tmp_path)) == ["loss.png", NAME]
