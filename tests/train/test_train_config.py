"""A run's settings: from flags and a file, checked by name, and settled by what there is."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longring import ArgumentError, Dense, Dilated
from longring.train.config import Config, differences, read
from longring.train.job import Job, learning_rate, new_model


def test_nothing_said_is_something_small_on_cores_and_larger_on_gpus():
    on_cores, on_gpus = (Config().settled(device=device, ranks=2) for device in ("cpu", "cuda"))
    assert (on_cores.context, on_cores.dim, on_cores.dtype, on_cores.device) == (4096, 128, "fp32", "cpu")
    assert (on_gpus.context, on_gpus.dim, on_gpus.dtype, on_gpus.device) == (65536, 512, "bf16", "cuda")
    assert (on_cores.ranks, on_cores.context_ranks, on_cores.data_ranks) == (2, 2, 1)
    assert (on_cores.batch, on_cores.warmup, on_cores.kv_heads) == (1, 10, 4)
    told = on_cores.as_json()
    assert Config(**json.loads(json.dumps(told))) == on_cores
    left_open = {"data", "weights", "node_ranks", "window", "dilated"}
    assert {name for name, value in told.items() if value is None} == left_open


def test_what_was_said_stays():
    said = Config(context=100, heads=2, dim=8, batch=6, context_ranks=2, warmup=0, dtype="bf16")
    found = said.settled(device="cpu", ranks=4)
    assert (found.context, found.heads, found.dim, found.batch, found.warmup, found.dtype) == (100, 2, 8, 6, 0, "bf16")
    assert found.data_ranks == 2


def test_a_flag_wins_over_the_file_and_both_over_nothing(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('context = "64K"\nlayers = 3\nlearning-rate = 1\nfsdp = true\n')
    found = read({"layers": 5, "heads": None, "seed": 7}, file)
    assert found == Config(context=64_000, layers=5, learning_rate=1.0, fsdp=True, seed=7)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("contxt = 5", "no such setting, 'contxt'; did you mean context?"),
        ("zzz = 5", "no such setting, 'zzz'; known are data, kind, "),
        ("[model]\ndim = 5", ": [model] is a table, and none are taken; settings stand on their own"),
        ("[train]\ndim = 5", ": [train] is a table, and none are taken"),
        ("context-ranks = 2\ncontext_ranks = 4", ": context_ranks is said twice, with - and with _"),
        ("layers = ", "is not TOML"),
        ('layers = "many"', "--layers must be a number like"),
        ("layers = 1.5", "--layers must be a whole number of at least 1, got 1.5"),
        ("layers = true", "--layers must be a whole number of at least 1, got True"),
        ("learning_rate = 0", "--learning-rate must be a number above 0, got 0.0"),
        ("clip = -1", "--clip must be a number of at least 0, got -1.0"),
        ("timeout = true", "--timeout must be 0.1 to 10,000,000 seconds, got True"),
        ("timeout = inf", "--timeout must be 0.1 to 10,000,000 seconds, got inf"),
        ("learning_rate = nan", "--learning-rate must be a number above 0, got nan"),
        ("fsdp = 1", "--fsdp must be true or false, got 1"),
        ('out = ""', "--out must be a text, got ''"),
        ('dtype = "fp8"', "--dtype must be one of bf16, fp32, fp64; got 'fp8'"),
        ('task = "keys"', "--task must be one of language, passkey; got 'keys'"),
        ("rotary_base = 1e-300", "--rotary-base must be a number above 1, got 1e-300"),
    ],
)
def test_what_a_file_may_not_say(tmp_path, text, said):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ArgumentError) as refused:
        read({}, file)
    assert said in str(refused.value)


def test_seconds_may_be_a_whole_number(tmp_path):
    (tmp_path / "run.toml").write_text("timeout = 60")
    assert read({}, tmp_path / "run.toml").timeout == 60.0


@pytest.mark.parametrize("model", ["decoder", "longnet"])
@pytest.mark.parametrize("dim", [24, 48, 96])
def test_the_width_inside_a_layer_is_the_one_that_the_model_has_by_itself(model, dim):
    settled = Config(model=model, dim=dim, heads=2, layers=1).settled(device="cpu", ranks=1)
    said, unsaid = (new_model(one, 257, device="meta") for one in (settled, replace(settled, feedforward=None)))
    assert [one.shape for one in said.parameters()] == [one.shape for one in unsaid.parameters()]


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ArgumentError, match="cannot be read"):
        read({}, tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match="cannot be read"):
        read({}, tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"context": 1}, "--context must be a whole number of at least 2, got 1"),
        ({"model": "gpt"}, "--model must be one of decoder, longnet; got 'gpt'"),
        ({"layout": "diagonal"}, "--layout must be one of auto, contiguous"),
        ({"schedule": "tree"}, "--schedule must be one of auto, ring"),
        ({"heads": 4, "kv_heads": 3}, "got 4 and 3"),
        ({"heads": 4, "dim": 20}, "twice --heads"),
        ({"steps": 5, "warmup": 6}, "--warmup must be at most --steps, got 6 and 5"),
        ({"window": 5, "dilated": "8:1"}, "--window is for dense attention"),
        ({"window": 5, "model": "longnet"}, "--window is for dense attention"),
        ({"rotary_base": 5.0, "model": "longnet"}, "--rotary-base is for --model decoder; leave it out"),
        ({"digits": 7}, "--digits is for --task passkey; leave it out"),
        ({"final_rate": 1.5}, "--final-rate is what is left of the learning rate, so at most 1; got 1.5"),
        ({"timeout": 1e300}, "--timeout must be 0.1 to 10,000,000 seconds, got 1e+300"),
        ({"timeout": 0.001}, "--timeout must be 0.1 to 10,000,000 seconds, got 0.001"),
        ({"dilated": "8"}, "LENGTH:RATE"),
        ({"ranks": 10**7}, "--ranks must be at most 1M, got 10,000,000"),
    ],
)
def test_what_contradicts_itself(words, said):
    with pytest.raises(ArgumentError) as refused:
        Config(**words)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("ranks", "words", "said"),
    [
        (4, {"context_ranks": 3}, "--context-ranks must divide the ranks, got 3 of 4"),
        (4, {"node_ranks": 3}, "--node-ranks must divide the ranks of a context, got 3 and 4"),
        (4, {"context_ranks": 2, "batch": 3}, "got 3 and 2 x 1"),
        (1, {"batch": 3, "micro_batch": 2}, "got 3 and 1 x 2"),
        (1, {"heads": 96}, "twice --heads"),
    ],
)
def test_what_does_not_fit_the_ranks(ranks, words, said):
    with pytest.raises(ArgumentError) as refused:
        Config(**words).settled(device="cpu", ranks=ranks)
    assert said in str(refused.value)


def test_patterns():
    assert Config().pattern() == Dense()
    assert Config(window=5).pattern((0, 3, 9)) == Dense(window=(4, 0), documents=(0, 3, 9))
    longnet = Config(model="longnet").settled(device="cpu", ranks=1)
    assert longnet.pattern() == Dilated(segment_lengths=(512, 2048, 4096), dilation_rates=(1, 2, 4))
    long = Config(model="longnet", context=1 << 20).settled(device="cpu", ranks=1)
    assert long.dilated == "2048:1,8192:4,32768:16,131072:64,524288:256,1048576:1024"
    assert Config(dilated="2Ki:1, 4Ki:2").pattern() == Dilated(segment_lengths=(2048, 4096), dilation_rates=(1, 2))


def test_the_rate_rises_in_a_line_and_falls_as_a_cosine():
    config = Config(steps=110, warmup=10, learning_rate=2.0, final_rate=0.1)
    rates = [learning_rate(config, step) for step in range(1, 121)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[59] == pytest.approx(2 * (0.1 + 0.9 * 0.5))  # half way
    assert rates[109] == pytest.approx(0.2)
    assert rates[119] == rates[109]
    assert all(a >= b for a, b in pairwise(rates[9:]))
    assert learning_rate(Config(steps=5, warmup=0), 1) < 1e-3
    assert math.isclose(learning_rate(Config(steps=5, warmup=5), 5), 1e-3)


def test_differences_are_told_as_flags():
    config = Config(dim=64, heads=4).settled(device="cpu", ranks=1)
    assert differences(config, replace(config, dim=32), ("dim", "heads")) == ["--dim was 32 and is 64"]


def test_the_files_of_the_documentation_are_settings(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    shown = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    assert shown
    for number, text in enumerate(shown):
        (tmp_path / f"{number}.toml").write_text(text)
        read({}, tmp_path / f"{number}.toml").settled(device="cpu", ranks=4)


@pytest.mark.parametrize("name", ["batch", "micro_batch"])
def test_a_step_of_a_billion_sequences_is_refused(name):
    assert getattr(Config(**{name: 2**20}), name) == 2**20
    with pytest.raises(ArgumentError, match=r"must be at most 1,048,576, got 1,000,000,000"):
        Config(**{name: 10**9})


def test_very_many_branches_are_refused(tmp_path):
    (tmp_path / "run.toml").write_text(f'dilated = "{",".join(["8:1"] * 200_000)}"')
    with pytest.raises(ArgumentError, match="at most 64 branches, got 200,000"):
        read({}, tmp_path / "run.toml")


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_model_that_no_machine_holds_is_refused_before_it_is_made(fsdp):
    """As of a vocabulary that a stranger's file of tokens names."""
    config = Config(fsdp=fsdp, batch=1).settled(device="cpu", ranks=1)
    world = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(ArgumentError, match=r"takes at least .* TiB, and cpu has .* logits of 2,147,483,647 tok"):
        Job(config, world, None, vocabulary=2**31 - 1)
    config = replace(config, dim=8, feedforward=8)  # weights that may fit, and logits that do not
    with pytest.raises(ArgumentError, match=r"logits of 2,147,483,647 tokens take 32 TiB"):
        Job(config, world, None, vocabulary=2**31 - 1)
