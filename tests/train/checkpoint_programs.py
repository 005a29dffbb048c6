"""What ranks do with checkpoints in tests, where a new process finds it by name."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from longring.train import checkpoints, states
from longring.train.checkpoints import durable
from longring.train.checkpoints.meeting import Meeting

ROWS = 7  # which no number of ranks in these tests divides


# --------------------------------------------------------------------------------------------- a state that is known


def values(step: int) -> dict[str, torch.Tensor]:
    """What the tensors of a step are, whole."""
    chance = torch.Generator().manual_seed(step)
    return {
        "dealt": torch.randn(ROWS, 5, generator=chance),
        "everywhere": torch.randn(11, generator=chance).to(torch.bfloat16),
        "count": torch.tensor(step),
    }


def state_of(step: int, group: Any = None) -> dict[str, Any]:
    """The same as this rank holds it: its rows of one tensor, the others whole."""
    whole = values(step)
    if group is not None:
        mesh = dist.DeviceMesh.from_group(group, "cpu")
        part = -(-ROWS // mesh.size())
        rows = whole["dealt"][part * mesh.get_local_rank() :][:part]
        whole["dealt"] = DTensor.from_local(rows, mesh, [Shard(0)], shape=torch.Size((ROWS, 5)), stride=(5, 1))
    return {"tensors": whole, "step": step, "words": {"name": f"step {step}", "list": [step, None, 0.1]}}


def check(state: dict[str, Any], step: int) -> None:
    """Bit for bit."""
    assert state["step"] == step
    assert state["words"] == {"name": f"step {step}", "list": [step, None, 0.1]}
    for name, expected in values(step).items():
        found = state["tensors"][name]
        found = found.full_tensor() if isinstance(found, DTensor) else found
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), name


def saved(folder: Path, step: int, group: Any = None, *, keep: int = 2, **options: Any) -> Path:
    return checkpoints.save(
        folder, step, state_of(step, group), about={"step": step}, keep=keep, group=group, **options
    )


def loaded(folder: Path, group: Any = None) -> int:
    """The step of the newest complete checkpoint, after everything in it was compared with what was saved."""
    found = checkpoints.find(folder, group=group)
    assert found, found.describe()
    state = state_of(10**6, group)
    assert checkpoints.load(found, state, group=group) == {"step": found.step}
    check(state, found.step)
    return found.step


# ------------------------------------------------------------------------------------------------------ real models


def trained(
    kind: str, steps: int, folder: str, resume: bool, save_as: int | None
) -> tuple[list[float], dict[str, Any]]:
    """Some steps of a model that stands alone, in DDP or in FSDP2; the losses, and the whole state at the end."""
    group = dist.group.WORLD if dist.is_initialized() else None
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3, bias=False)).double()
    if kind == "fsdp":
        ranks = dist.get_world_size()  # with 4, parameters are dealt over two ranks, and the same in the other two
        shape, names = ((2, 2), ("data", "context")) if ranks == 4 else ((ranks,), ("all",))
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 20)
    done = 0
    if resume:
        found = checkpoints.find(Path(folder), group=group)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # nothing is to be left of what it began with
        state = {**states.collect(model, optimiser, schedule), "done": -1}
        checkpoints.load(found, state, group=group)
        states.restore(state, model, optimiser, schedule)
        done = state["done"]
        assert done == found.step
    losses = []
    for step in range(done, done + steps):
        batch = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().sum()  # the same on all ranks, so that any number of them takes the same step
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    state = {**states.collect(model, optimiser, schedule), "done": done + steps}
    if save_as is not None:
        checkpoints.save(Path(folder), save_as, state, about={}, keep=3, group=group)
    return losses, whole(state)


def whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.full_tensor() if isinstance(state, DTensor) else state


# --------------------------------------------------------------------------------------- ranks, when nothing goes wrong


def saved_by_all(group: Any, folder: str) -> None:
    saved(Path(folder), 1, group)


def own_numbers(group: Any, folder: str, is_first: bool) -> list[float]:
    """Each rank draws numbers of its own, and those that come next after it was saved."""
    place, rank = Path(folder), dist.get_rank(group)
    if is_first:
        for seed in (random.seed, torch.manual_seed):
            seed(100 + rank)
        own = states.random_states()
        checkpoints.save(place, 1, {"step": 1}, about={}, keep=1, group=group, per_rank=own)
    else:
        own = states.random_states()
        checkpoints.load(checkpoints.find(place, group=group), {"step": 0}, group=group, per_rank=own)
        states.set_random_states(own)
    return [random.random(), torch.rand(1).item()]


# -------------------------------------------------------------------------------------------- when something goes wrong


def one_fails(group: Any, folder: str, victim: int) -> tuple[str, str, int]:
    """One rank cannot write; all hear of it, and the group can be used to try again."""
    place = Path(folder)
    saved(place, 1, group)
    opened = durable.SyncedFiles.create_stream
    if dist.get_rank(group) == victim:
        durable.SyncedFiles.create_stream = _full  # type: ignore[method-assign]
    try:
        saved(place, 2, group)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "nothing was raised"
    durable.SyncedFiles.create_stream = opened  # type: ignore[method-assign]
    between = loaded(place, group)
    saved(place, 3, group)
    return text, str(between), loaded(place, group)


def _full(*_: Any) -> Any:
    raise OSError(28, "No space left on device", "somewhere")


def steps_differ(group: Any, folder: str) -> None:
    saved(Path(folder), 1 + dist.get_rank(group), group)


def is_slow(group: Any, moved: int) -> str:
    """One rank takes longer than the timeout, which is too long unless it has much to read or to write."""
    rank = dist.get_rank(group)
    return Meeting(group, timeout=1.0).hold(
        "reading", lambda: time.sleep(6 * rank), lambda reports: ["done"] * len(reports), moved=moved
    )


def forgets_the_group(group: Any, folder: str) -> None:
    saved(Path(folder), 1)


def loses_one(group: Any, folder: str, victim: int, how: str, timeout: float) -> None:
    place, rank = Path(folder), dist.get_rank(group)
    saved(place, 1, group)
    if rank == victim:
        ends_at(3, how)
    saved(place, 2, group, timeout=timeout)


EVENTS = ["fsync", "rename", "replace", "mkdir", "unlink", "rmdir"]


def ends_at(moment: int, how: str = "kill", also: tuple[int, ...] = ()) -> None:
    """End this process, and others first, right before it changes something on the disk for the so-many-th time."""
    left = float(moment)

    def counted(before: Any, weight: float = 1.0) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= weight
            if left <= 0:
                for process in (*also, os.getpid()):
                    os.kill(process, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            return before(*args, **options)

        return call

    for name in EVENTS:
        setattr(os, name, counted(getattr(os, name)))
    durable._Summed.write = counted(durable._Summed.write, 0.1)  # type: ignore[method-assign]  # there are hundreds


def killed_at_every_moment(group: Any, folder: str, is_damaged: bool) -> list[int]:
    """A process saves step 3 alone, and is killed before its first change on the disk, its second, and so on.

    Step 3 was saved before, by a run that came this far: as the only one, or damaged, with good ones before it. Returns
    the step that was found after each moment; all else is asserted.
    """
    template = Path(folder) / "template"
    for step in (1, 2, 3):
        saved(template, step, keep=3 if is_damaged else 1)
    if is_damaged:
        (template / "step-00000003" / "manifest.json").write_text("")
    found: list[int] = []
    while True:
        place = Path(folder) / str(len(found))
        shutil.copytree(template, place)
        child = os.fork()
        if child == 0:
            ends_at(len(found) + 1)
            saved(place, 3, keep=1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        found.append(loaded(place))
        saved(place, 4, keep=1)  # the lock went with its owner
        assert sorted(path.name for path in place.iterdir()) == ["lock", "step-00000004"]
        assert loaded(place) == 4
        checkpoints.release(place)
        shutil.rmtree(place)
        if status == 0:  # it had saved before the moment came
            return found


def killed_while_saving(group: Any, folder: str, victim: int, moment: int, everybody: bool) -> str:
    """All save step after step until the victim comes to its moment, and with it, perhaps, everybody's."""
    place, rank = Path(folder), dist.get_rank(group)
    others = []
    if everybody:
        (place.parent / f"{place.name}.pids").mkdir(exist_ok=True)
        (place.parent / f"{place.name}.pids" / f"{rank}-{os.getpid()}").touch()
        dist.barrier(group)
        pids = [path.name.split("-") for path in (place.parent / f"{place.name}.pids").iterdir()]
        others = [int(pid) for other, pid in pids if int(other) != rank]
        dist.barrier(group)
    found = checkpoints.find(place, group=group)
    step = found.step if found else 0
    if found:
        loaded(place, group)
    if rank == victim:
        ends_at(moment, also=tuple(others))
    try:
        while True:
            step += 1
            saved(place, step, group, timeout=8.0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def saves_without_rights(group: Any) -> tuple[str, list[str]]:
    place = Path(tempfile.mkdtemp())  # not below pytest's own folder, which nobody else may even look into
    saved(place, 1)
    checkpoints.release(place)
    place.chmod(0o555)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)  # root may write anywhere
    text = refused(place)
    os.seteuid(before)
    place.chmod(0o755)
    left = sorted(path.name for path in place.iterdir())
    shutil.rmtree(place)
    return text.replace(str(place), "run"), left


def saves_on_a_full_disk(group: Any, folder: str, room: int) -> str:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))  # files cannot grow beyond this
    return refused(Path(folder))


def refused(folder: Path) -> str:
    try:
        saved(folder, 2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
