"""A run that was stopped goes on as if it had not been, on other ranks and in another layout too."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_attacks import sealed
from training_curves import SMALL, launched, losses, outcomes, refusals, settings, write_corpus

from longring import ArgumentError, RankFailed, launch
from longring.train import checkpoints
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


@pytest.fixture(scope="module")
def three_steps(corpus, tmp_path_factory):
    """A run's folder after three steps, to be copied, and its settings."""
    out = tmp_path_factory.mktemp("three") / "out"
    words = {"data": corpus, "steps": 4}
    launched([settings(1, out, **words | {"steps": 3, "warmup": 1})])
    return out, words | {"warmup": 1}


def copies(three_steps, tmp_path, ranks=1, **changes):
    """For each change a copy of the folder that it was made in, and settings that would go on there."""
    out, words = three_steps
    for name, change in changes.items():
        shutil.copytree(out, tmp_path / name)
        change(tmp_path / name)
    return [settings(ranks, tmp_path / name, **words) for name in changes]


def all_damaged(out):
    for path in out.glob("step-*/*.distcp"):
        path.write_bytes(path.read_bytes()[:-1])


def renamed_to(fate):
    def change(out):
        (path,) = out.glob("step-*")
        path.rename(path.with_name(f"{path.name}.{fate}-01234567"))

    return change


def test_where_all_checkpoints_are_damaged_it_does_not_begin_again_unasked(three_steps, tmp_path):
    """All ranks say the same, and leave the folder as it is; one that was killed before its first save begins."""
    changes = {"damaged": all_damaged, "deleting": renamed_to("deleting"), "asked": all_damaged}
    configs = copies(three_steps, tmp_path, 2, **changes, saving=renamed_to("saving"))
    configs[2] = replace(configs[2], restart_if_damaged=True)
    before = {path: path.read_bytes() for path in (tmp_path / "damaged").glob("*/*")}
    ranks = launch(outcomes, configs, ranks=2, timeout=110)
    assert ranks[0][:2] == ranks[1][:2]
    damaged, deleting, asked, saving = ranks[0]
    (name,) = (path.name for path in (tmp_path / "damaged").glob("step-*"))
    assert damaged.startswith(
        f"CheckpointError: --out {tmp_path / 'damaged'} has 1 checkpoint, and none is whole: {name}: __0_0.distcp has "
    )
    assert damaged.endswith(
        "They are kept as they are. Put a copy in their place, take another --out, or say "
        "--restart-if-damaged to begin at step 1"
    )
    assert {path: path.read_bytes() for path in before} == before
    assert "it was being deleted. They are kept" in deleting
    assert asked.startswith("from None to 4; ")
    assert "begins again at step 1, as --restart-if-damaged says" in asked
    assert saving.startswith("from None to 4; ")
    assert "no checkpoint was ever completed" in saving


def all_gone(out):
    for path in out.glob("step-*"):
        shutil.rmtree(path)


def all_renamed(out):
    for path in out.glob("step-*"):
        path.rename(path.with_name(f"{path.name}.bak"))


def told_steps(count, **config):
    """No checkpoint, but metrics of so many steps, and other times in what the run before was."""

    def change(out):
        all_gone(out)
        (out / "metrics.jsonl").write_text(
            "".join(f'{{"step": {number + 1}, "loss": 1.0}}\n' for number in range(count))
        )
        (out / "config.json").write_text(json.dumps(config))

    return change


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_unasked(three_steps, tmp_path):
    changes = {
        "gone": all_gone,
        "renamed": all_renamed,
        "later": told_steps(60, save_every=50, steps=100),
        "other": told_steps(1001, save_every="often", steps=[]),
    }
    asked = {"asked": all_gone}
    started = {
        "first": told_steps(50, save_every=50, steps=100),  # killed while it saved for the first time
        "early": told_steps(2, save_every=50, steps=100),
        "none": told_steps(0, save_every=50, steps=100),
    }
    configs = copies(three_steps, tmp_path, 2, **changes, **asked, **started)
    configs[len(changes)] = replace(configs[len(changes)], restart_if_damaged=True)
    before = {path: path.read_bytes() for name in changes for path in (tmp_path / name).rglob("metrics.jsonl")}
    ranks = launch(outcomes, configs, ranks=2, timeout=110)
    assert ranks[0] == ranks[1]
    for text, name, steps in zip(ranks[0], changes, ("3", "3", "60", "1,001"), strict=False):
        assert text.startswith("CheckpointError: ")
        assert f"--out {tmp_path / name} has no checkpoint, but metrics of {steps} steps, and the first " in text
        assert text.endswith("or say --restart-if-damaged to begin at step 1, which forgets these metrics")
    assert {path: path.read_bytes() for path in before} == before
    again, *others = ranks[0][len(changes) :]
    assert "begins again at step 1, as --restart-if-damaged says" in again
    assert all(text.startswith("from None to 4; ") for text in (again, *others))
    assert "metrics of 50 steps, but no checkpoint: the run begins at step 1" in others[0]
    assert "metrics of 2 steps, but no checkpoint" in others[1]
    assert others[2] == "from None to 4; "


def about_is(change):
    """Rightly signed."""

    def changed(out):
        (place,) = out.glob("step-*")
        told = json.loads((place / "manifest.json").read_bytes())
        told["about"] = change(told["about"])
        sealed(place, json.dumps(told).encode())

    return changed


ABOUT = {
    "nothing": (lambda about: {}, "it has no sequences"),
    "no_config": (lambda about: {k: v for k, v in about.items() if k != "config"}, "it has no config"),
    "config_null": (lambda about: about | {"config": None}, "it has no config"),
    "config_list": (lambda about: about | {"config": [1]}, "it has no config"),
    "config_text": (lambda about: about | {"config": "small"}, "it has no config"),
    "config_empty": (
        lambda about: about | {"config": {}},
        "its config leaves context, dim, layers, heads, batch, dtype open",
    ),
    "config_other": (lambda about: about | {"config": about["config"] | {"a b": 1}}, "its config has other names"),
    "config_wide": (
        lambda about: about | {"config": about["config"] | {"dim": "wide"}},
        "in its config, --dim must be a whole",
    ),
    "config_batch": (
        lambda about: about | {"config": about["config"] | {"batch": 1e400}},
        "in its config, --batch must be",
    ),
    "config_digits": (
        lambda about: about | {"config": about["config"] | {"dim": 4 * 10**4000}},
        "in its config, 'dim' is a number of 13290 bits",
    ),
    "config_context": (
        lambda about: about | {"config": about["config"] | {"context": 2**62}},
        "in its config, 'context' is 4,611,686,018,427,387,904, and at most 1,099,511,627,776",
    ),
    "config_layers": (
        lambda about: about | {"config": about["config"] | {"layers": 100_000}},
        "in its config, 'layers' is 100,000, and at most 10,000",
    ),
    "text": (lambda about: about | {"sequences": "many"}, "its sequences is no whole number"),
    "float": (lambda about: about | {"sequences": 4.7}, "its sequences is no whole number"),
    "negative": (lambda about: about | {"sequences": -1}, "its sequences is no whole number"),
    "large": (lambda about: about | {"sequences": 10**30}, "its sequences is no whole number"),
    "vocabulary": (lambda about: about | {"vocabulary": "257"}, "its vocabulary is no whole number"),
    "corpus": (lambda about: about | {"corpus": ["text"]}, "its corpus is no text"),
    "fingerprint": (lambda about: about | {"fingerprint": None}, "its fingerprint is no text"),
}


def test_what_a_checkpoint_says_about_its_run_is_checked(three_steps, tmp_path):
    configs = copies(three_steps, tmp_path, **{name: about_is(change) for name, (change, _) in ABOUT.items()})
    for text, (name, (_, why)) in zip(launch(outcomes, configs, ranks=1, timeout=110)[0], ABOUT.items(), strict=True):
        if name == "config_batch":  # JSON has no such number, so that it is damaged
            assert text.startswith("CheckpointError: ")
            assert "none is whole" in text
            continue
        assert text.startswith(f"ArgumentError: {tmp_path / name}/step-00000003 was written by another version of "), (
            name
        )
        assert why in text


def holding(change):
    """A checkpoint of the same run, saved as any is, with something else in it."""

    def changed(out):
        found = checkpoints.find(out)
        job = Job(settings(1, out), SimpleNamespace(device=torch.device("cpu")), None, vocabulary=257)
        state, own = job.state(), job.own_state()
        checkpoints.load(found, state, per_rank=own)
        change(state, own["random"])
        checkpoints.save(out, found.step, state, per_rank=own, about=found.about, keep=1)
        checkpoints.release(out)

    return changed


def _filled(part, value):
    def change(state, _):
        kept = state["optimiser"]["state"]
        for tensor in (state["model"] if part == "model" else {name: kept[name][part] for name in kept}).values():
            tensor.fill_(value)

    return change


def _random(name, value):
    return lambda _, random_: random_.__setitem__(name, value(random_[name]) if callable(value) else value)


VALUES = {
    "weights_nan": (_filled("model", float("nan")), r"its weights \S+ have nan or inf in them, as they were saved"),
    "weights_inf": (_filled("model", float("-inf")), r"its weights \S+ have nan or inf in them"),
    "moments_inf": (_filled("exp_avg", float("inf")), r"its optimiser's exp_avg of \S+ have nan or inf"),
    "moments_nan": (_filled("exp_avg_sq", float("nan")), r"its optimiser's exp_avg_sq of \S+ have nan"),
    "moments_negative": (_filled("exp_avg_sq", -1.0), r"its optimiser's exp_avg_sq of \S+ is negative"),
    "steps_negative": (_filled("step", -1.0), r"its optimiser's step of \S+ is negative"),
    "python_large": (_random("python", lambda was: (was[0], (10**30,) * 625, None)), "of Python are in a state"),
    "python_short": (_random("python", lambda was: (was[0], was[1][:5], None)), "of Python are in a state"),
    "python_text": (_random("python", "state"), "random numbers are in a state"),
    "python_index": (_random("python", lambda was: (3, (*was[1][:624], 700), None)), "random numbers are in a state"),
    "python_old": (_random("python", lambda was: (2, *was[1:])), "of Python are in a state"),
    "numpy_place": (_random("numpy", lambda was: (*was[:2], 10**6, *was[3:])), "of numpy are in a state"),
    "numpy_large": (_random("numpy", lambda was: (was[0], [10**30] * 624, *was[2:])), "of numpy are in a state"),
    "numpy_name": (_random("numpy", lambda was: ("PCG64", *was[1:])), "of numpy are in a state"),
    "torch_short": (_random("torch", b"12345"), "random numbers are in a state"),
    "torch_text": (_random("torch", "state"), "of torch are in a state"),
    "torch_zeros": (_random("torch", lambda was: bytes(len(was))), "random numbers are in a state"),
    "gpu": (_random("cuda", [1, 2]), "of the GPU are in a state"),
    "settings": (lambda state, _: state["optimiser"]["param_groups"][0].update(lr="fast", eps=[]), None),
    "names": (lambda state, _: state["optimiser"]["param_groups"][0]["params"].__setitem__(0, "other"), None),
    "weights_large": (_filled("model", 1e300), "which no step has changed yet: they are of no use"),
}


def test_values_that_no_run_saves_are_refused_by_name(three_steps, tmp_path):
    """Though every checksum is right. The optimiser's settings in it do not matter: they are the config's."""
    configs = copies(three_steps, tmp_path, **{name: holding(change) for name, (change, _) in VALUES.items()})
    for text, (name, (_, why)) in zip(launch(outcomes, configs, ranks=1, timeout=110)[0], VALUES.items(), strict=True):
        if why is None:
            assert text.startswith("from 3 to 4; "), name
            continue
        kind = "NotFinite" if name == "weights_large" else "CheckpointError"
        assert re.match(f"{kind}: .*{why}", text), f"{name}: {text}"
        assert f"{tmp_path / name}/step-00000003" in text
    assert losses(tmp_path / "settings") == losses(tmp_path / "names")


def test_weights_that_no_run_saves_are_no_weights_to_begin_with(three_steps, tmp_path):
    out, words = three_steps
    shutil.copytree(out, tmp_path / "nan")
    holding(_filled("model", float("nan")))(tmp_path / "nan")
    config = settings(1, tmp_path / "new", **words, weights=str(tmp_path / "nan"))
    (text,) = launch(outcomes, [config], ranks=1, timeout=60)[0]
    assert text.startswith(f"CheckpointError: loading {tmp_path / 'nan'}/step-00000003: its weights ")


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
