"""What a run leaves of itself: whole lines, a board and a picture where they can be, and where its time went."""

import json
import signal
import sys
import time
from types import ModuleType

import pytest
import torch

from longring.schedules.labels import Activity, during, watching
from longring.train import stopping as stopping_module
from longring.train.meter import Meter
from longring.train.metrics import Metrics, steps
from longring.train.picture import draw
from longring.train.small_files import put
from longring.train.stopping import Stopping, passed_on


def record(step):
    return {"step": step, "loss": 5 / step, "tokens_per_second": 10.0, "learning_rate": 1e-3, "gradient_norm": 1.0}


def test_a_run_that_goes_on_keeps_the_steps_that_are_done(tmp_path):
    first = Metrics(tmp_path, step=0, about={"config": {}})
    for step in (1, 2, 3):
        first.step(record(step))
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # killed
    second = Metrics(tmp_path, step=2, about={"config": {"ranks": 3}})
    second.step(record(3))
    second.close()
    assert [told["step"] for told in steps(tmp_path)] == [1, 2, 3]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line).get("run") for line in lines] == [
        {"config": {}},
        None,
        None,
        {"config": {"ranks": 3}},
        None,
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"], "nothing is left beside it"


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    path = tmp_path / "config.json"
    (tmp_path / ".config.json.0123abcd").write_text("hal")
    put(path, "whole\n")
    assert path.read_text() == "whole\n"
    assert [left.name for left in tmp_path.iterdir()] == ["config.json"]


def test_a_file_is_as_it_was_when_its_writer_fails(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    put(path, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        put(path, "new")
    assert path.read_text() == "old"


def test_a_number_that_json_does_not_know_is_refused(tmp_path):
    metrics = Metrics(tmp_path, step=0, about={})
    with pytest.raises(ValueError, match="Out of range float values"):
        metrics.step({**record(1), "loss": float("nan")})
    metrics.close()


class Board:
    def __init__(self, folder, purge_step):
        self.folder, self.purge_step, self.told, self.is_closed = folder, purge_step, [], False

    def add_scalar(self, name, value, step):
        self.told.append((name, value, step))

    def close(self):
        self.is_closed = True


def test_tensorboard_hears_of_every_step_where_it_is_installed(tmp_path, monkeypatch):
    installed = ModuleType("torch.utils.tensorboard")
    boards = []
    installed.SummaryWriter = lambda *args, **words: boards.append(Board(*args, **words)) or boards[-1]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", installed)
    metrics = Metrics(tmp_path, step=4, about={})
    metrics.step(record(5))
    metrics.close()
    (board,) = boards
    assert (board.folder, board.purge_step, board.is_closed) == (str(tmp_path / "tensorboard"), 5, True)
    assert ("loss", 1.0, 5) in board.told
    assert len(board.told) == 4


def test_without_it_nothing_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    Metrics(tmp_path, step=0, about={}).close()
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("count", [1, 30, 80])
def test_the_picture(tmp_path, count):
    pytest.importorskip("matplotlib")
    assert draw([record(step) for step in range(1, count + 1)], tmp_path / "loss.png", title="a run")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_no_picture_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw([record(1)], tmp_path / "loss.png", title="a run")
    assert not (tmp_path / "loss.png").exists()


def test_time_is_told_apart_and_read_once():
    meter = Meter(torch.device("cpu"))
    for kind in ("compute", "wait", "merge", "post"):
        with meter.watch(Activity(kind, None)):  # type: ignore[arg-type]
            time.sleep(0.01)
    with meter.messages():
        time.sleep(0.01)
    attention, messages = meter.read()
    assert attention >= 0.02
    assert messages >= 0.03
    assert meter.read() == (0, 0)


def test_a_meter_hears_of_attention_while_it_watches():
    import longring as lr

    meter = Meter(torch.device("cpu"))
    q, k, v = torch.randn(3, 1, 64, 2, 8, requires_grad=True).unbind(0)
    with watching(meter.watch):
        lr.attention(q, k, v).sum().backward()
    assert meter.read()[0] > 0
    lr.attention(q, k, v)
    assert meter.read() == (0, 0)
    assert during("compute", None) is not None


def test_a_signal_is_heard_and_ends_nothing():
    stopping = Stopping()
    before = signal.getsignal(signal.SIGTERM)
    with stopping.listening():
        assert not stopping.is_asked
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert stopping.is_asked
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_starts_ranks_passes_the_first_signal_on_and_leaves_at_the_second(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping_module, "start_fork_server", lambda ignoring: None)  # this process has one already
    before = signal.getsignal(signal.SIGTERM)
    with passed_on(tmp_path / "stop") as stop:
        rank = Stopping(stop)
        assert not rank.is_asked
        signal.raise_signal(signal.SIGTERM)
        assert rank.is_asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system tells of no closed terminal")
def test_a_closed_terminal_asks_to_stop_however_often(tmp_path, monkeypatch):
    """A shell and the system may both tell of it; and nohup says that nobody is to care."""
    silenced = []
    monkeypatch.setattr(stopping_module, "start_fork_server", lambda ignoring: silenced.append(ignoring))
    monkeypatch.setattr(stopping_module, "fall_silent", lambda: silenced.append("output"))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with passed_on(tmp_path / "stop") as stop:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
            assert Stopping(stop).is_asked
        assert silenced == [(signal.SIGTERM, signal.SIGHUP), "output", "output"]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with passed_on(tmp_path / "other") as stop, Stopping().listening():
            signal.raise_signal(signal.SIGHUP)
            assert not stop.exists()
    finally:
        signal.signal(signal.SIGHUP, before)
