"""Names of steps: there for whoever watches, and nothing at all where nobody does."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import longring as lr
from longring.geometry.plans import PLANS
from longring.schedules import labels
from longring.schedules.labels import Activity, Doing, watching
from longring.testing import run_ranks

N, RANKS = 64, 4


class Listener:
    """Remembers what it hears: (rank, kind, phase, step, words), at the beginning and at the end of it."""

    def __init__(self):
        self.begun, self.ended = [], []

    def __call__(self, activity):
        doing = activity.doing
        said = doing.journey.transport.rank, activity.kind, doing.phase, doing.step, doing.words
        listener = self

        class Range:
            def __enter__(self):
                listener.begun.append(said)

            def __exit__(self, *_):
                listener.ended.append(said)

        return Range()


def attend(group, schedule, layout="zigzag", **options):
    whole = torch.randn(3, 1, N, 4, 16, generator=torch.Generator().manual_seed(0))  # threads share torch's own
    s = lr.Sharding(N, group, layout)
    q, k, v = (s.shard(x).requires_grad_() for x in whole)
    out = lr.attention(q, k, v, sharding=s, schedule=schedule, **options)
    return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def heard_of(schedule, node_ranks=2):
    listener = Listener()
    with watching(listener):
        run_ranks(RANKS, lambda group: attend(group, schedule), node_ranks=node_ranks)
    return listener


@pytest.mark.parametrize("schedule", PLANS)
def test_every_rank_tells_of_computing_posting_and_waiting_in_both_passes(schedule):
    listener = heard_of(schedule)
    assert Counter(listener.begun) == Counter(listener.ended)
    for rank in range(RANKS):
        for phase in ("forward", "backward"):
            kinds = {said[1] for said in listener.begun if said[0] == rank and said[2] == phase}
            assert kinds == {"compute", "post", "wait", "merge"}


@pytest.mark.parametrize("schedule", PLANS)
def test_what_is_posted_is_waited_for(schedule):
    heard = Counter(heard_of(schedule).begun)
    for (rank, kind, *rest), times in heard.items():
        if kind == "post":
            assert heard[(rank, "wait", *rest)] == times


def test_a_ring_names_its_steps_and_whose_keys_they_are():
    heard = [said[1:] for said in heard_of("ring").begun if said[0] == 1]
    computed = [(phase, step, words) for kind, phase, step, words in heard if kind == "compute"]
    assert computed == [
        ("forward", 0, "own keys"),
        *(("forward", step, f"keys of {(1 + step) % RANKS}") for step in range(1, RANKS)),
        ("backward", 0, "own keys"),
        *(("backward", step, f"keys of {(1 + step) % RANKS}") for step in range(1, RANKS)),
        ("backward", RANKS, "own keys"),
    ]
    posted = [(phase, step, words) for kind, phase, step, words in heard if kind == "post"]
    assert ("forward", 3, "keys and values") in posted
    assert ("backward", 2, "gradients") in posted


def test_messages_are_told_with_their_tensors():
    sizes = Counter()

    def note(activity):
        for direction, messages in (("sent", activity.sends), ("received", activity.receives)):
            sizes[direction] += sum(x.nbytes for _, x in messages)
        return labels._NOTHING

    with watching(note):
        sent = run_ranks(2, lambda group: (attend(group, "ring"), group.bytes_sent)[1])
    assert sizes["sent"] == sizes["received"] == sum(sent) > 0


@pytest.mark.parametrize("schedule", PLANS)
def test_where_nobody_watches_no_text_is_made(schedule, monkeypatch):
    def refuse(*_):
        raise AssertionError("a name was made, though nobody reads it")

    for made in (Doing, Activity):
        monkeypatch.setattr(made, "__str__", refuse)
    monkeypatch.setattr(Doing, "words", property(refuse))
    monkeypatch.setattr(labels, "_named", refuse)
    run_ranks(RANKS, lambda group: attend(group, schedule), node_ranks=2)


def test_watching_changes_no_number():
    plain = run_ranks(RANKS, lambda group: attend(group, "ring"))
    with watching(Listener()):
        watched = run_ranks(RANKS, lambda group: attend(group, "ring"))
    assert all(
        torch.equal(a, b) for one, two in zip(plain, watched, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_watchers_come_and_go():
    first, second = Listener(), Listener()
    q = torch.randn(1, 8, 2, 4)
    with watching(first):
        with watching(second):
            lr.attention(q, q, q)
        lr.attention(q, q, q)
    lr.attention(q, q, q)
    assert len(first.begun) == 2 * len(second.begun) > 0
    assert not labels.is_watched()


def test_an_error_ends_its_ranges():
    listener = Listener()
    q = torch.randn(1, 8, 2, 4)
    q[0, 0, 0, 0] = torch.nan
    with pytest.MonkeyPatch.context() as patch, watching(listener):
        patch.setenv("LONGRING_DEBUG", "1")
        with pytest.raises(lr.NotFinite, match="rank 0 of 1, ring, forward, step 0, own keys: nan"):
            lr.attention(q, q, q, schedule="ring")
    assert listener.begun == listener.ended


# ------------------------------------------------------------------------------------------------ the profilers


def names_in(prof):
    return [event.name for event in prof.events() if event.name.startswith("longring ")]


def profiled_rank():
    """On a process: the names that torch.profiler has of one call."""
    attend(dist.group.WORLD, "ring")
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        attend(dist.group.WORLD, "ring")
    return names_in(prof)


@pytest.mark.processes
def test_torch_profiler_shows_the_steps_of_a_process():
    for rank, names in enumerate(lr.launch(profiled_rank, ranks=2, timeout=60)):
        for phase in ("forward", "backward"):
            assert f"longring ring {phase} step 1: keys of {1 - rank}" in names
            assert f"longring ring {phase} step 1: post keys and values" in names
            assert f"longring ring {phase} step 1: wait for keys and values" in names
        assert "longring ring backward step 1: wait for gradients" in names
        assert "longring ring backward step 2: merge gradients that came" in names


def test_compiled_code_keeps_its_graph_and_its_names():
    q = torch.randn(1, 32, 2, 8, requires_grad=True)

    def loss(x):
        return lr.attention(x, x, x, schedule="ring").square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    (plain,) = torch.autograd.grad(loss(q), q)
    torch.autograd.grad(compiled(q), q)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        (found,) = torch.autograd.grad(compiled(q), q)
    assert torch.equal(plain, found)
    names = names_in(prof)
    assert "longring ring forward step 0: own keys" in names
    assert "longring ring backward step 0: own keys" in names


def test_nvtx_gets_balanced_ranges_of_the_same_names(monkeypatch):
    stack, seen = [], []
    monkeypatch.setattr(labels, "_is_for_nsys", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (stack.append(name), seen.append(name)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: stack.pop())
    run_ranks(1, lambda group: attend(group, "ring"))
    assert not stack
    assert "longring ring forward step 0: own keys" in seen
