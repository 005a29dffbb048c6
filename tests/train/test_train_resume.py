"""A run that was stopped goes on as if it had not been, on other ranks and in another layout too."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from training_curves import SMALL, launched, losses, refusals, settings, write_corpus

from longring import ArgumentError, RankFailed, launch
from longring.train.job import Job
from longring.train.tasks import corpus_of

pytestmark = pytest.mark.processes

STEPS = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(write_corpus(tmp_path_factory.mktemp("corpus") / "text"))


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The losses of a run that nobody stopped, on one rank."""
    out = tmp_path_factory.mktemp("whole")
    launched([settings(1, out, data=corpus, steps=STEPS)])
    return losses(out)


def test_four_ranks_then_two_then_three_continue_one_curve(corpus, whole, tmp_path):
    parts = [
        (4, {"layout": "zigzag", "context_ranks": 2}),
        (2, {"layout": "contiguous", "schedule": "gather", "fsdp": True}),
        (3, {"layout": "striped", "schedule": "ulysses"}),
    ]
    for number, (ranks, words) in enumerate(parts):
        config = settings(ranks, tmp_path, data=corpus, steps=STEPS, **words)
        (report,) = launched([config], stop_in_step=4 if ranks != 3 else None)
        assert report.steps == 4 * (number + 1)
        assert report.resumed_from == (None if number == 0 else 4 * number)
        assert report.is_stopped == (number < 2)
    found = losses(tmp_path)
    assert max(abs(a - b) for a, b in zip(found, whole, strict=True)) < 1e-9
    told = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    begun = [line["run"] for line in told if "run" in line]
    assert [run["config"]["ranks"] for run in begun] == [4, 2, 3]
    assert [run["resumed_from"] for run in begun] == [None, 4, 8]


def test_steps_beyond_the_checkpoint_are_done_again_and_told_once(corpus, whole, tmp_path):
    """What a killed run leaves: a checkpoint, metrics of later steps, half a line, half a checkpoint."""
    config = settings(2, tmp_path, data=corpus, steps=STEPS)
    launched([config], stop_in_step=5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 1e9}\n{"step": 7, "lo')
    (tmp_path / "step-00000007.saving-00000000").mkdir()
    (report,) = launched([config])
    assert report.resumed_from == 5
    assert any("step-00000007" in note and "not finished" in note for note in report.notes)
    assert max(abs(a - b) for a, b in zip(losses(tmp_path), whole, strict=True)) < 1e-9


def test_a_finished_run_has_nothing_to_do_until_there_are_more_steps(corpus, tmp_path):
    words = {"data": corpus, "warmup": 1, "final_rate": 1.0}  # a rate that does not depend on the last step
    launched([settings(1, tmp_path, steps=3, **words)])
    (again,) = launched([settings(1, tmp_path, steps=3, **words)])
    assert (again.steps, again.resumed_from, again.last_loss) == (3, 3, None)
    (more,) = launched([settings(1, tmp_path, steps=5, **words)])
    assert (more.steps, more.resumed_from) == (5, 3)
    assert len(losses(tmp_path)) == 5


def test_a_batch_that_nobody_named_stays_that_of_the_checkpoint(corpus, whole, tmp_path):
    """Two rings took a sequence each; one ring takes both, one after the other, and three cannot."""
    words = {"data": corpus, "steps": STEPS, "batch": None, "context_ranks": 1}
    launched([settings(2, tmp_path, **words)], stop_in_step=4, keeps_batch=True)
    (text,) = launch(refusals, [settings(3, tmp_path, **words)], True, ranks=3, timeout=60)[0]
    assert text.startswith(
        f"--batch was 2 in {tmp_path}, which is no multiple of data ranks times --micro-batch, now 3 x 1"
    )
    assert "say --batch 3 " in text
    (report,) = launched([settings(1, tmp_path, **words)], keeps_batch=True)
    assert (report.resumed_from, report.batch) == (4, 2)
    assert "a step stays at 2 sequences, as saved; by itself it would be 1 on 1 ring (--batch 1)" in report.notes
    assert json.loads((tmp_path / "config.json").read_text())["batch"] == 2
    assert max(abs(a - b) for a, b in zip(losses(tmp_path), whole, strict=True)) < 1e-9


def test_a_run_goes_on_with_the_decay_of_now(tmp_path):
    """Of matrices, and still of nothing else."""
    was, now = (
        Job(
            settings(1, tmp_path, weight_decay=decay), SimpleNamespace(device=torch.device("cpu")), None, vocabulary=257
        )
        for decay in (0.1, 0.5)
    )
    now.restore(was.state(), was.own_state(), taken=3)
    assert [group["weight_decay"] for group in now.optimiser.param_groups] == [0.5, 0.0]


def test_random_numbers_go_on_where_they_were(tmp_path):
    """Nothing that is trained draws any as yet, so that no loss would tell."""

    def drawn():
        return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()

    world = SimpleNamespace(device=torch.device("cpu"))
    was = Job(settings(1, tmp_path), world, None, vocabulary=257)
    state, own = was.state(), was.own_state()
    want = drawn()
    now = Job(settings(1, tmp_path, seed=5), world, None, vocabulary=257)
    assert drawn() != want
    now.restore(state, own, taken=3)
    assert drawn() == want


def test_a_checkpoint_that_left_the_width_of_layers_open_goes_on(corpus, tmp_path):
    config = settings(1, tmp_path, data=corpus, steps=4)
    launched([replace(config, feedforward=None)], stop_in_step=2)
    (report,) = launched([config])
    assert (report.resumed_from, report.steps) == (2, 4)
    wider = settings(1, tmp_path, data=corpus, steps=4, feedforward=129)
    (text,) = launch(refusals, [wider], ranks=1, timeout=60)[0]
    assert "--feedforward was 128 and is 129" in text


def test_the_same_data_by_another_path_goes_on_and_changed_data_does_not(tmp_path):
    data = write_corpus(tmp_path / "text")
    out = tmp_path / "out"
    launched([settings(1, out, data=os.path.relpath(data), steps=4)], stop_in_step=2)
    assert json.loads((out / "config.json").read_text())["data"] == str(data)
    (tmp_path / "link").symlink_to(data)
    (report,) = launched([settings(1, out, data=str(tmp_path / "link"), steps=4)], stop_in_step=1)
    assert (report.resumed_from, report.steps) == (2, 3)
    (data / "new.txt").write_text("new")
    (text,) = launch(refusals, [settings(1, out, data=str(data), steps=4)], ranks=1, timeout=60)[0]
    assert "the data is called text as before, but its files have changed since, or are others" in text


def test_a_start_that_was_refused_leaves_no_data(corpus, tmp_path):
    """Its lock is there; but what other runs read stays the same."""
    data = write_corpus(tmp_path / "project")
    before = corpus_of(settings(1, tmp_path / "elsewhere", data=str(data)))
    refused = settings(1, data / "out", data=str(data), weights=str(tmp_path / "nowhere"))
    assert "--weights" in launch(refusals, [refused], ranks=1, timeout=60)[0][0]
    assert [path.name for path in (data / "out").iterdir()] == ["lock"]
    after = corpus_of(settings(1, tmp_path / "elsewhere", data=str(data)))
    assert after.fingerprint == before.fingerprint
    assert after.describe().endswith("; left out: 1 folder of a run")


def test_a_run_inside_its_data_goes_on(tmp_path):
    """What it writes there is none of it."""
    data = write_corpus(tmp_path / "project")
    out = data / "out" / "train"
    config = settings(2, out, data=str(data), steps=6)
    launched([config], stop_in_step=3)
    (report,) = launched([config])
    assert (report.resumed_from, report.steps) == (3, 6)
    with pytest.raises(ArgumentError, match="is the folder of the data"):
        corpus_of(settings(1, data, data=str(data), steps=6))


def test_where_no_checkpoint_is_whole_it_says_that_it_begins_anew(corpus, tmp_path):
    config = settings(1, tmp_path, data=corpus, steps=3)
    launched([config])
    for path in tmp_path.glob("step-*/*.distcp"):
        path.write_bytes(path.read_bytes()[:-1])
    (report,) = launched([config])
    assert report.resumed_from is None
    assert any("no whole checkpoint is left" in note and "begins anew" in note for note in report.notes)


def test_another_run_is_not_gone_on_with(corpus, tmp_path):
    """Other weights, or another order of the data: each refused by name, with both values."""
    same = {"data": corpus, "steps": 3}
    launched([settings(1, tmp_path, **same)])
    others = [{"dim": 64}, {"seed": 1}, {"context": 62}, {"data": None}, {"model": "longnet", "heads": 2}]
    others += [{"dtype": "fp32"}]
    texts = launch(refusals, [settings(1, tmp_path, **{**same, **other}) for other in others], ranks=1, timeout=60)[0]
    said = [
        "--dim was 32 and is 64",
        "--seed was 0 and is 1",
        "--context was 61 and is 62",
        "the data was text and is Python",
        "--model was decoder and is longnet; --heads was 4 and is 2; --dilated was None and is 7:1,30:2,61:4",
        "--dtype was fp64 and is fp32",
    ]
    for text, words in zip(texts, said, strict=True):
        assert words in text
        assert text.endswith("Say the same, or another --out")


def test_the_same_ranks_repeat_every_bit(corpus, tmp_path):
    words = {"data": corpus, "dtype": "fp32", "steps": 8}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    launched([settings(2, whole, **words)])
    launched([settings(2, parts, **words)], stop_in_step=3)
    launched([settings(2, parts, **words)])
    assert losses(whole) == losses(parts)
    assert len(losses(whole)) == 8 < SMALL["steps"]


def test_a_loss_that_is_no_number_ends_the_run_and_saves_nothing(corpus, tmp_path):
    config = settings(2, tmp_path, data=corpus, learning_rate=1e30, warmup=0, clip=0.0, dtype="fp32", save_every=1)
    with pytest.raises(RankFailed, match=r"step \d+: the loss is .*nan.*lower --learning-rate") as failed:
        launched([config])
    assert failed.value.error_type == "NotFinite"
    kept = losses(tmp_path)
    assert all(loss == loss for loss in kept)
