"""Checkpoints: what was saved comes back bit for bit, by any number of ranks; what was touched is never trusted."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from checkpoint_attacks import sealed
from checkpoint_programs import check, loaded, refused, saved, state_of, trained
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import longring as lr
from documents import code_of
from longring.train import checkpoints, states
from longring.train.checkpoints import archives, claims, durable, index, manifest, values
from worlds import World, results


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "run"
    yield place
    checkpoints.release(place)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------------------------------- what comes back


def test_everything_a_state_may_hold_comes_back_bit_for_bit(folder):
    whole = torch.randn(6, 8)
    state = {
        "tensors": {
            "float": torch.randn(3, 4),
            "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
            "half": torch.randn(5).bfloat16(),
            "complex": torch.randn(2, dtype=torch.complex64),
            "whole numbers": torch.arange(4),
            "truth": torch.tensor([True, False]),
            "one": torch.tensor(3.0),
            "none": torch.empty(0, 3),
            "view": whole[::2, 1:5].T,
            "parameter": nn.Parameter(torch.randn(2)),
        },
        "list": [torch.randn(2), {"deep": torch.randn(1)}],
        "values": {"a": None, "b": True, "c": -(10**30), "d": 0.1, "e": "é", "f": b"\x00\xff", "g": (1, [2, {"h": 3}])},
    }
    about = {"config": {"lr": 0.1, "layers": [1, 2]}, "name": "ü"}
    place = checkpoints.save(folder, 7, state, about=about, keep=1)
    assert place == folder / "step-00000007"

    empty = _emptied(state)
    found = checkpoints.find(folder)
    assert found.path == place
    assert (found.step, found.ranks, found.about, found.skipped) == (7, 1, about, ())
    assert checkpoints.load(found, empty) == about
    assert _bits(empty) == _bits(state)
    assert not empty["tensors"]["view"].requires_grad


def _emptied(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict) and any(isinstance(inner, (dict, list, torch.Tensor)) for inner in value.values()):
        return {key: _emptied(inner) for key, inner in value.items()}
    if isinstance(value, dict):
        return dict.fromkeys(value, "nothing")
    return [_emptied(inner) for inner in value] if isinstance(value, list) else "nothing"


def _bits(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), pickle.dumps(value.detach().contiguous().view(-1).tolist())
    if isinstance(value, dict):
        return {key: _bits(inner) for key, inner in value.items()}
    return [_bits(inner) for inner in value] if isinstance(value, list) else value


def test_a_run_goes_on_as_if_nothing_had_happened(folder):
    """Dropout, so that random numbers count; the losses of both runs are equal to the last bit."""

    def begun():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimiser, torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, 20)

    def steps(model, optimiser, schedule):
        losses = []
        for _ in range(3):
            loss = model(torch.full((8, 4), random.random())).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
        return losses

    run = begun()
    steps(*run)
    checkpoints.save(folder, 3, states.collect(*run), about={}, keep=1, per_rank=states.random_states())
    uninterrupted = steps(*run)

    other = begun()
    steps(*other)
    steps(*other)
    state, own = states.collect(*other), states.random_states()
    checkpoints.load(checkpoints.find(folder), state, per_rank=own)
    states.restore(state, *other)
    states.set_random_states(own)
    assert steps(*other) == uninterrupted


def test_the_loop_of_the_page_runs_twice(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    (script,) = code_of("checkpoints.md")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        exec(compile(script, "docs/checkpoints.md", "exec"), {})
    checkpoints.release(tmp_path / "runs" / "a")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "no complete checkpoint in runs/a"
    assert f"says `{second}`" in " ".join(page.split())
    assert names(tmp_path / "runs" / "a") == ["lock", "step-00000005", "step-00000006"]


def test_random_numbers_of_numpy_come_back(folder):
    import numpy as np

    before = states.random_states()
    np.random.seed(4)
    np.random.standard_normal()  # which keeps a second one for the next call
    checkpoints.save(folder, 1, {"step": 1}, about={}, keep=1, per_rank=states.random_states())
    expected = np.random.standard_normal(3).tolist()
    own = states.random_states()
    checkpoints.load(checkpoints.find(folder), {"step": 0}, per_rank=own)
    states.set_random_states(own)
    assert np.random.standard_normal(3).tolist() == expected
    states.set_random_states(before)


def test_a_model_loads_without_its_optimiser(folder):
    model = nn.Linear(3, 2)
    optimiser = torch.optim.AdamW(model.parameters())
    checkpoints.save(folder, 1, states.collect(model, optimiser), about={}, keep=1)
    other = nn.Linear(3, 2)
    state = states.collect(other)
    checkpoints.load(checkpoints.find(folder), state)
    states.restore(state, other)
    assert torch.equal(model.weight, other.weight)


def test_torch_reads_it_too(folder):
    """A checkpoint is one of torch.distributed.checkpoint, for whoever trusts it."""
    import torch.distributed.checkpoint as dcp

    place = saved(folder, 3)
    state = state_of(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.distributed is not initialised
        dcp.load(state, checkpoint_id=place)
    check(state, 3)


# ------------------------------------------------------------------------------------------------- numbers of ranks


@pytest.mark.processes
def test_other_numbers_of_ranks_and_other_frameworks_go_on(tmp_path):
    """4 ranks of FSDP2, 2 of DDP, 3 of FSDP2, one process: the curve and the state of a run that was never stopped."""
    folder = str(tmp_path / "run")
    expected, _ = trained("alone", 8, folder, False, None)
    at_the_end = None
    begun = 0
    for kind, ranks in (("fsdp", 4), ("ddp", 2), ("fsdp", 3), ("alone", 1)):
        args = (kind, 2, folder, begun > 0, begun + 2)
        runs = lr.launch(trained, *args, ranks=ranks, timeout=60) if ranks > 1 else [trained(*args)]
        for losses, state in runs:
            assert losses == pytest.approx(expected[begun : begun + 2], rel=1e-12)
            at_the_end = state
        begun += 2
    _, uninterrupted = trained("alone", 8, folder, False, None)
    assert at_the_end is not None
    torch.testing.assert_close(at_the_end["model"], uninterrupted["model"], rtol=1e-12, atol=1e-12)
    assert checkpoints.find(Path(folder)).ranks == 1
    checkpoints.release(Path(folder))


@pytest.mark.processes
def test_what_all_ranks_hold_is_written_once_and_shared_out(tmp_path):
    alone, four = tmp_path / "alone", tmp_path / "four"
    saved(alone, 1)
    results(4, "checkpoint_programs:saved_by_all", str(four))
    written = four / "step-00000001"
    known = index.read((written / ".metadata").read_bytes(), manifest.get(written))
    keys = [place.fqn for place in known.storage_data]
    assert sorted(set(keys)) == sorted(known.state_dict_metadata)
    assert {key: keys.count(key) for key in keys if keys.count(key) > 1} == {"tensors.dealt": 4}
    sizes = [facts.bytes for name, facts in manifest.get(written).files.items() if name.endswith("distcp")]
    assert len(sizes) == 4
    assert loaded(four) == 1
    checkpoints.release(alone)


@pytest.mark.processes
def test_each_rank_goes_on_with_random_numbers_of_its_own(tmp_path):
    folder = str(tmp_path / "run")
    drawn = results(3, "checkpoint_programs:own_numbers", folder, True)
    assert len({str(numbers) for numbers in drawn}) == 3
    assert results(4, "checkpoint_programs:own_numbers", folder, False) == [*drawn, drawn[0]]


# ------------------------------------------------------------------------------------------------------------ damage


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder with two checkpoints, to be copied."""
    place = tmp_path_factory.mktemp("checkpoints") / "run"
    for step in (1, 2):
        saved(place, step)
    checkpoints.release(place)
    return place


FILES = ["__0_0.distcp", ".metadata", "manifest.json", "manifest.sha256"]


@pytest.fixture
def copied(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path / "run")
    assert set(names(tmp_path / "run" / "step-00000002")) == set(FILES)
    return tmp_path / "run"


def skipped_because(folder, name="step-00000002"):
    """Why the newer one was not taken; the older one is, and is whole."""
    found = checkpoints.find(folder)
    assert found.step == 1
    assert loaded(folder) == 1
    assert [skip.name for skip in found.skipped] == [name]
    assert f"\nskipped {name}: {found.skipped[0].why}" in found.describe()
    return found.skipped[0].why


@pytest.mark.parametrize("name", FILES)
def test_no_flipped_bit_is_missed(name, copied):
    path = copied / "step-00000002" / name
    content, chance = path.read_bytes(), random.Random(name)
    places = range(len(content)) if len(content) < 200 else chance.sample(range(len(content)), 60)
    for place in {0, len(content) - 1, *places}:
        changed = bytearray(content)
        changed[place] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        found = checkpoints.find(copied)
        assert found.step == 1, f"byte {place} of {name}"
        assert name in found.skipped[0].why or "manifest" in name
    path.write_bytes(content)
    assert checkpoints.find(copied).step == 2


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_short_or_missing_is_noticed(name, copied):
    path = copied / "step-00000002" / name
    content = path.read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        assert name in skipped_because(copied)
    path.write_bytes(content + b"\n")
    assert name in skipped_because(copied)
    path.unlink()
    assert skipped_because(copied) == f"{name} is missing"


def test_bytes_that_moved_inside_a_file_are_noticed(copied):
    path = copied / "step-00000002" / "__0_0.distcp"
    content = path.read_bytes()
    path.write_bytes(content[100:] + content[:100])
    assert skipped_because(copied) == "__0_0.distcp was changed since it was written: its checksum differs"


def test_files_of_another_checkpoint_are_noticed(copied):
    shutil.copy(copied / "step-00000001" / "__0_0.distcp", copied / "step-00000002")
    assert "__0_0.distcp" in skipped_because(copied)


def test_a_renamed_checkpoint_is_noticed(copied):
    shutil.copytree(copied / "step-00000001", copied / "step-00000003")
    found = checkpoints.find(copied)
    assert found.step == 2
    assert [tuple(skip) for skip in found.skipped] == [
        ("step-00000003", "its manifest is that of step 1: it was renamed")
    ]


def rewritten(place, **changes):
    """A manifest that is consistent in itself, with other contents."""
    content = json.loads((place / "manifest.json").read_bytes()) | changes
    _sealed(place, content)


def _sealed(place, content):
    text = json.dumps(content).encode()
    (place / "manifest.json").write_bytes(text)
    (place / "manifest.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": 2}, "it has format 2, and this version of longring reads format 1"),
        ({"format": None}, "it has format None"),
        ({"files": {}}, "lists no file .metadata"),
        ({"files": {".metadata": 3}}, "lacks what format 1 has"),
        ({"files": {"../step-00000001/.metadata": {"bytes": 1, "sha256": ""}}}, "plain name"),
        ({"files": {"..": {"bytes": 1, "sha256": ""}, ".metadata": {"bytes": 1, "sha256": ""}}}, "plain name: '..'"),
        ({"step": -1}, "says step -1"),
        ({"ranks": 0}, "written by 0 ranks"),
        ({"about": 3}, "lacks what format 1 has"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_not_trusted(changes, why, copied):
    rewritten(copied / "step-00000002", **changes)
    assert why in skipped_because(copied)


@pytest.mark.parametrize("text", ["", "[]", "3", "[" * 100_000, '{"format": 1}', "\xff"])
def test_a_manifest_that_is_no_manifest_is_not_trusted(text, copied):
    place = copied / "step-00000002"
    content = text.encode("latin1")
    (place / "manifest.json").write_bytes(content)
    (place / "manifest.sha256").write_text(f"{hashlib.sha256(content).hexdigest()}  manifest.json\n")
    assert "manifest" in skipped_because(copied)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_files_are_read(kind, copied):
    path = copied / "step-00000002" / "__0_0.distcp"
    elsewhere = path.rename(copied.parent / "elsewhere")
    {"link": lambda: path.symlink_to(elsewhere), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    assert skipped_because(copied) == "__0_0.distcp is not a file"


def test_other_things_in_the_folders_do_not_matter(copied):
    (copied / "metrics.jsonl").touch()
    (copied / "step-1").mkdir()
    (copied / "step-00000009").touch()
    (copied / "step-00000002" / ".DS_Store").touch()
    assert loaded(copied) == 2


def test_nothing_is_found_where_nothing_is(tmp_path):
    for place in (tmp_path, tmp_path / "not there"):
        found = checkpoints.find(place)
        assert not found
        assert found.describe() == f"no complete checkpoint in {place}"
        with pytest.raises(lr.ArgumentError, match="no complete checkpoint in"):
            _ = found.step
        with pytest.raises(lr.ArgumentError, match="nothing to load: no complete checkpoint"):
            checkpoints.load(found, {"a": 1})
    (tmp_path / "file").touch()
    with pytest.raises(lr.ArgumentError, match="file is a file"):
        checkpoints.find(tmp_path / "file")


def test_all_damaged_is_none_found(copied):
    for step in (1, 2):
        (copied / f"step-0000000{step}" / "manifest.json").unlink()
    (copied / "step-00000003.saving-0123abcd").mkdir()
    found = checkpoints.find(copied)
    assert not found
    assert found.describe().splitlines() == [
        f"no complete checkpoint in {copied}",
        "skipped step-00000003.saving-0123abcd: it was not finished: its writer was ended, or is at it now",
        "skipped step-00000002: manifest.json is missing",
        "skipped step-00000001: manifest.json is missing",
    ]


def test_what_changes_between_finding_and_loading_is_noticed(copied):
    found = checkpoints.find(copied)
    path = copied / "step-00000002" / ".metadata"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(lr.CheckpointError, match=r"\.metadata was changed since it was written"):
        checkpoints.load(found, state_of(0))


# ------------------------------------------------------------------------------------------------------------ attacks


class Attack:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def consistent(place):
    """Give the files as they are now a manifest that fits."""
    content = json.loads((place / "manifest.json").read_bytes())
    for name in content["files"]:
        data = (place / name).read_bytes()
        content["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    _sealed(place, content)


def test_an_index_that_would_run_code_is_refused(copied, tmp_path):
    place, mark = copied / "step-00000002", tmp_path / "mark"
    (place / ".metadata").write_bytes(pickle.dumps(Attack(mark)))
    consistent(place)
    found = checkpoints.find(copied)
    assert found.step == 2  # nothing is wrong with its checksums
    with pytest.raises(lr.CheckpointError, match=r"\.metadata asks for posix\.mkdir, which no index needs"):
        checkpoints.load(found, state_of(0))
    assert not mark.exists()
    with suppress(AttributeError):
        torch.distributed.checkpoint.FileSystemReader(place).read_metadata()
    assert mark.exists()  # torch's own reader would have done it: the attack is real


@pytest.mark.parametrize(
    "asked", [("builtins", "eval"), ("os", "system"), ("torch", "load"), ("torch.serialization", "load"), ("os", "a.b")]
)
def test_no_name_but_those_of_an_index_is_looked_up(asked, copied):
    module, name = asked
    content = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode()
    trusted = manifest.get(copied / "step-00000002")
    with pytest.raises(lr.CheckpointError, match=f"asks for {module}.{name}"):
        index.read(content + b"\x93.", trusted)
    with pytest.raises(lr.CheckpointError, match="something outside the file"):
        index.read(b"\x80\x04\x8c\x01aQ.", trusted)


@pytest.mark.parametrize("key", ["step", "tensors.count"])
def test_a_value_that_would_run_code_is_refused(key, copied, tmp_path):
    """In the place of a value, and of a tensor."""
    place, mark = copied / "step-00000002", tmp_path / "mark"
    known = index.read((place / ".metadata").read_bytes(), manifest.get(place))
    where = next(info for place_, info in known.storage_data.items() if place_.fqn == key)
    bad = io.BytesIO()
    torch.save(Attack(mark), bad)
    path = place / where.relative_path
    where.offset, where.length = path.stat().st_size, len(bad.getvalue())
    path.write_bytes(path.read_bytes() + bad.getvalue())
    (place / ".metadata").write_bytes(pickle.dumps(known))
    consistent(place)
    found = checkpoints.find(copied)
    assert found.step == 2
    with pytest.raises(lr.CheckpointError, match="what only running code could read, and is not read"):
        checkpoints.load(found, state_of(0))
    assert not mark.exists()


def _changed(known, what):
    first = next(iter(known.storage_data.values()))
    tensor = known.state_dict_metadata["tensors.dealt"]
    if what == "another folder":
        first.relative_path = "../step-00000001/__0_0.distcp"
    if what == "a transformation":
        first.transform_descriptors = ["zstd"]
    if what == "beyond the end":
        first.length = 10**9
    if what == "before the beginning":
        first.offset = -1
    if what == "a part twice":
        tensor.chunks = tensor.chunks * 2
    if what == "a part missing":
        tensor.chunks = []
    if what == "a part too large":
        tensor.chunks[0].sizes = torch.Size([70, 5])
    if what == "no place":
        known.storage_data = {}
    if what == "a path":
        known.planner_data["step"] = ["step"]
    if what == "not an index":
        return known.state_dict_metadata
    if what == "parts missing":
        del known.__dict__["storage_data"]
    return known


@pytest.mark.parametrize(
    "what",
    [
        "another folder",
        "a transformation",
        "beyond the end",
        "before the beginning",
        "a part twice",
        "a part missing",
        "a part too large",
        "no place",
        "a path",
        "not an index",
        "parts missing",
    ],
)
def test_an_index_is_checked_against_the_manifest(what, copied):
    place = copied / "step-00000002"
    known = index.read((place / ".metadata").read_bytes(), manifest.get(place))
    (place / ".metadata").write_bytes(pickle.dumps(_changed(known, what)))
    consistent(place)
    with pytest.raises(lr.CheckpointError, match=r"\.metadata (cannot be right|is not an index)"):
        checkpoints.load(checkpoints.find(copied), state_of(0))


def parts(count, ranks=64):
    """An index of so many parts, each on a rank of its own, as torch pickles it; and its manifest."""
    described, paths, places = {}, {}, {}
    for number in range(count // ranks):
        key, size = f"optimiser.state.layers.{number}.weight.exp_avg", torch.Size([ranks, 100])
        offsets = [torch.Size([rank, 0]) for rank in range(ranks)]
        chunks = [ChunkStorageMetadata(offset, torch.Size([1, 100])) for offset in offsets]
        described[key] = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
        paths[key] = ("optimiser", "state", f"layers.{number}.weight", "exp_avg")
        for rank, offset in enumerate(offsets):
            places[MetadataIndex(key, offset, rank)] = _StorageInfo(f"__{rank}_0.distcp", 1000 * number, 1000)
    known = Metadata(described, paths, places)
    content = pickle.dumps(known)
    files = {f"__{rank}_0.distcp": durable.Facts(10**7, "0" * 64) for rank in range(ranks)}
    files[".metadata"] = durable.Facts(len(content), "0" * 64)
    return known, content, manifest.Manifest(1, ranks, files, {})


def test_an_index_of_many_parts_is_what_torch_made_it_and_takes_seconds():
    """100,000 parts take some four seconds of a core; a tenth of it here, on a machine that may be busy."""
    known, content, trusted = parts(10_000)
    began = time.process_time()
    found = index.read(content, trusted)
    assert time.process_time() - began < 5
    assert found.state_dict_metadata == known.state_dict_metadata
    assert found.planner_data == known.planner_data
    assert found.storage_data == known.storage_data


@pytest.mark.parametrize("protocol", [4, 5])
def test_both_protocols_of_pythons_to_come_are_read(protocol):
    known, _, trusted = parts(64)
    assert index.read(pickle.dumps(known, protocol), trusted).storage_data == known.storage_data


def test_tensors_are_what_torch_load_makes_of_them(tmp_path):
    whole = torch.randn(6, 8)
    kinds = [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
    ]
    kinds += [torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64]
    kinds += [torch.float8_e4m3fn, torch.float8_e5m2]
    tensors = [whole.mul(9).to(kind) for kind in kinds]
    tensors += [
        whole[::2, 1:5].T,
        whole[3],
        torch.tensor(3.0),
        torch.empty(0, 3),
        torch.empty(3, 0),
        whole[:1].expand(5, 8),
    ]
    complex_ = torch.randn(3, dtype=torch.complex64)
    tensors += [
        complex_.conj(),
        complex_.conj().imag,
        nn.Parameter(whole).detach(),
        torch.randn(5, 2, 3, 2).transpose(1, 3),
    ]
    for tensor in tensors:
        with (tmp_path / "archive").open("wb") as file:
            file.write(b"before")
            torch.save(tensor, file)
            length = file.tell() - 6
            file.write(b"behind")
        with (tmp_path / "archive").open("rb") as file:
            found = archives.tensor(file, 6, length, tensor.dtype, tensor.size())
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        found, expected = (one.resolve_conj().resolve_neg().clone().contiguous() for one in (found, tensor))
        as_bytes = [one.view(torch.uint8) if one.ndim else one[None].view(torch.uint8) for one in (found, expected)]
        assert torch.equal(*as_bytes), tensor


def test_values_are_what_torch_load_makes_of_them():
    shared = [1, 2]
    values_ = [
        None,
        True,
        -(10**1000),
        2**31,
        -1,
        0.1,
        float("inf"),
        "é\ud800",
        b"",
        b"\x00\xff",
        (),
        [],
        {},
        ((1,),),
        "a" * 300,
    ]
    values_ += [{1: [shared, shared], (1, "a"): {b"b": None}}, random.Random(3).getstate(), list(range(1000)), [[[[]]]]]
    for value in values_:
        archive = io.BytesIO()
        torch.save(value, archive)
        values.check("value", value)
        assert archives.value(archive, 0, len(archive.getvalue())) == value


def test_random_bytes_are_no_index(copied):
    trusted, chance = manifest.get(copied / "step-00000002"), random.Random(0)
    content = (copied / "step-00000002" / ".metadata").read_bytes()
    for _ in range(300):
        changed = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        with suppress(lr.CheckpointError):  # some changes are of names alone: whatever is read obeys the manifest
            index.read(bytes(changed), trusted)


# ----------------------------------------------------------------------------------------------------- what is refused


def nested(depth):
    whole = []
    for _ in range(depth - 1):
        whole = [whole]
    return whole


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.tensor([1.0]).numpy()[0], "numpy.float32"),
        (torch.tensor([1.0], dtype=torch.float64).numpy()[0], "numpy.float64"),
        ({"deep": [1, (2, {3})]}, "builtins.set"),
        (Path("a"), "pathlib"),
        (torch.float32, "torch.dtype"),
        (torch.eye(2).to_sparse(), "layout"),
        (nested(101), "more than 100 lists in lists"),
        ([[0] * 1000] * 2000, "of the same lists again and again"),
        ((dict.fromkeys(range(10_001)),), "more than 10000 keys that are no text"),
        (nn.Linear(1, 1), "Linear"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(value, what, folder):
    with pytest.raises(lr.ArgumentError, match=what):
        checkpoints.save(folder, 1, {"fine": 1, "odd": value}, about={}, keep=1)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": -1}, "step must be a whole number of at least 0, got -1"),
        ({"step": 1.0}, "got 1.0"),
        ({"keep": 0}, "keep must be a whole number of at least 1, got 0"),
        ({"state": {}}, "not be empty"),
        ({"state": {1: 2}}, "keys of str"),
        ({"state": {"ranks": 1}}, "call it something else"),
        ({"about": {"a": float("nan")}}, "about must be what JSON can hold"),
        ({"about": {"a": Path("a")}}, "about must be what JSON can hold"),
        ({"about": {"a": nested(49)}}, "at most 65536 bytes, and 49 lists and dicts within each other"),
        ({"about": {"a": nested(100_000)}}, "about must be what JSON can hold"),
        ({"about": {"a": "a" * (64 << 10)}}, "What is larger belongs into the state"),
        ({"step": 2**63}, r"step must be below 2\*\*63"),
        ({"about": {1: 2}}, "about must come back from JSON as it is"),
        ({"about": 3}, "about must come back from JSON as it is"),
        ({"timeout": 0}, "timeout must be a positive number"),
        ({"group": "all"}, "group must be"),
    ],
)
def test_arguments_that_make_no_sense(changes, words, folder):
    call = {"step": 1, "state": {"a": 1}, "about": {}, "keep": 1} | changes
    with pytest.raises(lr.ArgumentError, match=words):
        checkpoints.save(folder, call.pop("step"), call.pop("state"), **call)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {"a": {"x": 1}},
            r"'a' is not what was saved: 0 keys in the state alone, 1 key \(a.y\) in the checkpoint alone",
        ),
        ({"a": {"x": 1, "y": 1, "z": 1}}, r"1 key \(a.z\) in the state alone"),
        ({"other": 1}, r"'other' is not what was saved: 1 key \(other\)"),
        ({"b": torch.zeros(3)}, r"b was saved as torch.float32 of size \[2\] and is torch.float32 of size \[3\] here"),
        ({"b": torch.zeros(2, dtype=torch.float64)}, "is torch.float64 of size"),
        ({"b": 1}, "b is a tensor in the checkpoint, but not here"),
        ({"a": {"x": torch.zeros(1), "y": 2}}, "a.x is a value in the checkpoint, but not here"),
    ],
)
def test_a_state_of_another_shape_is_refused(state, words, folder):
    checkpoints.save(folder, 1, {"a": {"x": 1, "y": 2}, "b": torch.ones(2)}, about={}, keep=1)
    with pytest.raises(lr.ArgumentError, match=words):
        checkpoints.load(checkpoints.find(folder), state)


def test_a_folder_that_is_a_file(folder):
    folder.write_text("mine")
    with pytest.raises(lr.ArgumentError, match="run is a file; checkpoints need a folder"):
        saved(folder, 1)
    assert folder.read_text() == "mine"


@pytest.mark.processes
def test_a_folder_that_may_not_be_written_to():
    text, left = results(1, "checkpoint_programs:saves_without_rights")[0]
    assert text == "CheckpointError: planning the checkpoint of step 2: run/lock cannot be opened: Permission denied"
    assert left == ["lock", "step-00000001"]


@pytest.mark.processes
@pytest.mark.parametrize("room", [700, 4000])
def test_a_disk_that_is_full(room, folder):
    saved(folder, 1)
    checkpoints.release(folder)
    text = results(1, "checkpoint_programs:saves_on_a_full_disk", str(folder), room)[0]
    assert text.startswith("CheckpointError: saving the checkpoint of step 2: File too large")
    assert text.endswith("; free some space, or keep fewer checkpoints")
    assert names(folder) == ["lock", "step-00000001"]
    assert loaded(folder) == 1


def test_no_space_left_is_said_as_it_is(folder, monkeypatch):
    """torch.save hides it behind an error of its own."""
    saved(folder, 1)

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable._Summed, "write", full)
    assert refused(folder) == (
        "CheckpointError: saving the checkpoint of step 2: No space left on device; "
        "free some space, or keep fewer checkpoints"
    )
    assert names(folder) == ["lock", "step-00000001"]


@pytest.mark.processes
def test_two_runs_do_not_save_into_one_folder(folder, tmp_path):
    """Refused while the other lives, though it saves nothing at the moment; and nothing of it is touched."""
    (folder / "step-00000009.saving-0123abcd").mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", _OTHER_RUN, str(folder)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "saved\n"
        (folder / "step-00000009.saving-0123abcd").mkdir()
        text = refused(folder)
        left = names(folder)
        other.kill()
    assert f"another run saves into {folder}: process {other.pid} on " in text
    assert text.startswith("CheckpointError: planning the checkpoint of step 2: another run")
    assert text.endswith("; give this run a folder of its own, or end that one")
    assert left == ["lock", "step-00000005", "step-00000009.saving-0123abcd"]
    saved(folder, 6)
    assert names(folder) == ["lock", "step-00000005", "step-00000006"]


_OTHER_RUN = """
import sys, time
from pathlib import Path
from longring.train import checkpoints
checkpoints.save(Path(sys.argv[1]), 5, {"a": 1}, about={}, keep=1)
print("saved", flush=True)
time.sleep(100)
"""


def test_a_claim_is_not_inherited(folder):
    saved(folder, 1)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # later Pythons warn of threads, which the child does not use
        child = os.fork()
    if child == 0:
        os._exit(17 if "another run" in refused(folder) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17


def test_a_folder_that_was_removed_is_claimed_anew(folder):
    saved(folder, 1)
    shutil.rmtree(folder)
    saved(folder, 2)
    assert names(folder) == ["lock", "step-00000002"]
    assert json.loads((folder / "lock").read_text())["process"] == os.getpid()


def test_where_there_are_no_locks_nothing_of_others_is_removed(folder, monkeypatch):
    import fcntl

    def none(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    left = folder / "step-00000009.saving-0123abcd"
    left.mkdir(parents=True)
    with pytest.warns(UserWarning, match="has no locks"):
        saved(folder, 1)
    assert left.exists()
    assert loaded(folder) == 1
    assert folder.resolve() not in claims._held


# ------------------------------------------------------------------------------------------------- what stays and goes


def test_the_newest_stay(folder):
    for step in (1, 2, 3, 10, 20):
        saved(folder, step, keep=3)
    assert names(folder) == ["lock", "step-00000003", "step-00000010", "step-00000020"]
    saved(folder, 30, keep=1)
    assert names(folder) == ["lock", "step-00000030"]


def test_damaged_ones_are_not_counted(folder):
    for step in (1, 2, 3):
        saved(folder, step, keep=3)
    (folder / "step-00000003" / "__0_0.distcp").write_bytes(b"short")
    saved(folder, 4, keep=2)
    assert names(folder) == ["lock", "step-00000002", "step-00000003", "step-00000004"]


def test_a_step_is_saved_again(folder):
    for step in (1, 2):
        saved(folder, step, keep=3)
    (folder / "step-00000002" / "__0_0.distcp").write_bytes(b"short")
    for _ in range(2):  # over a damaged one, and over a good one
        saved(folder, 2, keep=3)
        assert names(folder) == ["lock", "step-00000001", "step-00000002"]
        assert loaded(folder) == 2


def test_what_was_replaced_is_found_until_the_new_one_is_there(folder):
    for step in (1, 2):
        saved(folder, step, keep=3)
    (folder / "step-00000002").rename(folder / "step-00000002.replaced-0123abcd")
    assert loaded(folder) == 2
    saved(folder, 3, keep=3)
    assert names(folder) == ["lock", "step-00000001", "step-00000003"]


def test_a_run_that_was_set_back_never_deletes_what_it_has_just_saved(folder):
    """100 looks good by its sizes, but is not: a run that began again at 50 must not lose 60 to it."""
    for step in (50, 100):
        saved(folder, step, keep=2)
    path = folder / "step-00000100" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[99] ^= 1
    path.write_bytes(content)
    assert checkpoints.find(folder).step == 50
    saved(folder, 60, keep=1)
    assert names(folder) == ["lock", "step-00000060", "step-00000100"]
    assert loaded(folder) == 60
    saved(folder, 100, keep=1)
    assert names(folder) == ["lock", "step-00000100"]
    assert loaded(folder) == 100


def test_what_killed_runs_left_is_removed(folder):
    saved(folder, 1)
    for name in ("step-00000002.saving-0123abcd", "step-00000001.deleting-0123abcd"):
        (folder / name).mkdir()
        (folder / name / "__0_0.distcp").write_bytes(b"half")
    found = checkpoints.find(folder)
    assert [skip.name for skip in found.skipped] == ["step-00000002.saving-0123abcd"]
    saved(folder, 3)
    assert names(folder) == ["lock", "step-00000001", "step-00000003"]


def test_a_run_that_goes_on_meanwhile_is_looked_at_again(folder, monkeypatch):
    """With keep=1 the one that was found is deleted while it is read."""
    saved(folder, 1, keep=1)
    check_sums, still = manifest.check_sums, [2, 3]

    def slow(path, *more):
        if still:
            saved(folder, still.pop(0), keep=1)
        check_sums(path, *more)

    monkeypatch.setattr(manifest, "check_sums", slow)
    found = checkpoints.find(folder)
    assert (found.step, found.skipped) == (3, ())
    still += range(4, 100)
    with pytest.raises(lr.CheckpointError, match="deleted faster than they can be read"):
        checkpoints.find(folder)


def test_steps_of_any_number_are_in_order(folder):
    for step in (99_999_999, 100_000_000, 1_000_000_000):
        saved(folder, step, keep=2)
        assert loaded(folder) == step
    assert names(folder) == ["lock", "step-100000000", "step-1000000000"]


# ------------------------------------------------------------------------------------------ what a loss of power leaves


def test_everything_is_on_the_disk_before_it_has_its_name(folder, monkeypatch):
    """Files are synced after their last byte, the folder after its last name, and only then it is renamed."""
    saved(folder, 1)
    events = []
    sync, rename = os.fsync, os.rename

    def synced(opened):
        path = Path(os.readlink(f"/proc/self/fd/{opened}"))
        events.append(("sync", path.name, path.stat().st_size if path.is_file() else None, frozenset(_inside(path))))
        sync(opened)

    def renamed(source, target, **options):
        events.append(("rename", Path(source).name, Path(target).name, None))
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    place = saved(folder, 2)
    monkeypatch.undo()
    moment = next(i for i, event in enumerate(events) if event[0] == "rename" and event[2] == place.name)
    draft = events[moment][1]
    before = [event for event in events[:moment] if event[0] == "sync"]
    sizes = {name: size for _, name, size, _ in before if size is not None}
    assert sizes.pop(".metadata.tmp") == (place / ".metadata").stat().st_size
    assert sizes == {path.name: path.stat().st_size for path in place.iterdir() if path.name != ".metadata"}
    folders = [inside for _, name, _, inside in before if name == draft]
    assert folders[-1] == set(names(place))
    assert before[-2][:2] == ("sync", "manifest.sha256")  # the last file
    assert ("sync", folder.name) in [event[:2] for event in events[moment:]]


def _inside(path):
    return [inner.name for inner in path.iterdir()] if path.is_dir() else []


# ------------------------------------------------------------------------------------------------ ranks that fail


@pytest.mark.processes
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_cannot_write_fails_the_save_on_all(victim, tmp_path):
    for text, between, after in results(3, "checkpoint_programs:one_fails", str(tmp_path / "run"), victim):
        assert text == (
            f"CheckpointError: saving the checkpoint of step 2: rank {victim}: No space left on device (somewhere); "
            "free some space, or keep fewer checkpoints"
        )
        assert between == "1"
        assert after == 3
    assert names(tmp_path / "run") == ["lock", "step-00000001", "step-00000003"]


@pytest.mark.processes
def test_ranks_that_save_different_steps_are_told(tmp_path):
    for outcome in World(2, "checkpoint_programs:steps_differ", (str(tmp_path / "run"),), ends="at once").run():
        assert outcome.error == "Disagreement"
        assert "step 1" in outcome.text
        assert "step 2" in outcome.text
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
@pytest.mark.parametrize(("victim", "how"), [(0, "kill"), (1, "kill"), (2, "stop")])
def test_a_rank_that_is_lost_hangs_nobody(victim, how, tmp_path):
    folder, timeout, began = tmp_path / "run", 3.0, time.monotonic()
    args = (str(folder), victim, how, timeout)
    outcomes = World(3, "checkpoint_programs:loses_one", args, absent=(victim,), ends="at once").run(limit=60)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.error == "PeerLost", f"{outcome.error} {outcome.text}\n{outcome.printed}"
        assert outcome.rank_named == victim
        assert outcome.phase_and_step == "saving the checkpoint of step 2"
        assert outcome.at - began < 50
    assert loaded(folder) == 1
    assert victim == 0 or names(folder) == ["lock", "step-00000001"]  # rank 0 leaves nothing, unless it was killed


@pytest.mark.processes
def test_a_forgotten_group_is_refused(tmp_path):
    for outcome in World(2, "checkpoint_programs:forgets_the_group", (str(tmp_path),), ends="at once").run():
        assert outcome.error == "ArgumentError"
        assert outcome.text == "there are 2 ranks, and no group says which of them take part; give group="


@pytest.mark.processes
def test_a_rank_that_has_much_to_read_is_waited_for():
    assert results(2, "checkpoint_programs:is_slow", 10**9) == ["done", "done"]
    waited = World(2, "checkpoint_programs:is_slow", (0,), ends="at once").run()[0]
    assert waited.error == "PeerLost"
    assert waited.rank_named == 1


def test_a_folder_of_other_digits_is_no_checkpoint(tmp_path):
    """int() takes those of every script, and others for the same step."""
    place = saved(tmp_path, 1)
    checkpoints.release(tmp_path)
    for name in (
        "step-" + "\N{ARABIC-INDIC DIGIT TWO}" * 8,
        "step-0000000\N{FULLWIDTH DIGIT THREE}",
        "step-" + "9" * 200,
    ):
        place.with_name(name).mkdir()
    found = checkpoints.find(tmp_path)
    assert (found.step, found.skipped) == (1, ())


def test_manifests_are_bounded_and_read_one_at_a_time(tmp_path):
    """Each of a million dicts takes 64 bytes, and there may be many of them."""
    saved(tmp_path, 1)
    checkpoints.release(tmp_path)
    for step in range(2, 40):
        place = tmp_path / f"step-{step:08d}"
        place.mkdir()
        told = b'{"format": 1, "step": 2, "a": [' + b"{}," * (330_000 if step > 10 else 2_000_000) + b"{}]}"
        sealed(place, told)
    before = _peak()
    found = checkpoints.find(tmp_path)
    assert found.step == 1
    assert "far more than any needs" in dict(found.skipped)["step-00000010"]
    assert "written by None ranks" in dict(found.skipped)["step-00000039"]
    assert _peak() - before < 200 << 20


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
