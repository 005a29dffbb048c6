"""Every argument that ranks must give alike, with a call in which one rank gives another: CASES, by kind of call.

`test_terms.py` runs them over virtual ranks and over processes, and fails where ranks compare a term, or a public
function has an argument, that no case is about. The programs are found by name in processes of their own.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import longring as lr
from longring.train import checkpoints
from longring.transport.process_group import ProcessGroupTransport
from longring.transport.select import transport_for

TIMEOUT = 20.0
ONE_DRAWS = threading.Lock()  # ranks may be threads, and torch has one state of random numbers


class Case(NamedTuple):
    """`argument` of the function differs on one rank by `changes`; all ranks hear that `term` does."""

    argument: str
    term: str
    changes: dict[str, Any]
    usual: Mapping[str, Any] = MappingProxyType({})  # besides what every call of its kind has


class Kind(NamedTuple):
    """Calls with one name, or what comes of them in their backward."""

    call: Callable[..., Any]  # of (group, **words)
    cases: list[Case]
    in_backward: bool = False
    after: str = ""  # a call of the same function before it, which has compared its terms already


# ------------------------------------------------------------------------------------------------------- the calls


def attend(
    group: Any,
    function: Callable[..., Any] = lr.attention,
    *,
    n: int = 12,
    n_k: int = 12,
    sizes: tuple[int, int, int, int] = (1, 4, 2, 8),  # batch, heads, kv heads, d
    dtype: torch.dtype = torch.float32,
    layout: str = "zigzag",
    kv_layout: str = "zigzag",
    by_group: bool = False,
    replicated: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Of this rank's tokens. Queries and keys are dealt apart, so that each may differ alone."""
    batch, heads, kv_heads, d = sizes
    queries, keys = lr.Sharding(n, group, layout), lr.Sharding(n_k, group, kv_layout)
    held = n if replicated else queries.local_length
    draw = torch.Generator().manual_seed(queries.rank)
    q, k = (
        torch.randn(batch, rows, count, d, generator=draw).to(dtype).requires_grad_()
        for rows, count in ((held, heads), (keys.local_length, kv_heads))
    )
    where: dict[str, Any] = {"sharding": "replicated" if replicated else queries, "kv_sharding": keys}
    where = {"group": group, "layout": layout} if by_group else where
    return function(q, k, k, timeout=TIMEOUT, **where, **options)


def unshard(
    group: Any, *, shape: tuple[int, ...] = (1, 4, 2), dim: int = 1, dtype: torch.dtype = torch.float32, **how: Any
) -> torch.Tensor:
    s = lr.Sharding(4 * transport_for(group).size, group, how.get("layout", "contiguous"))
    return s.unshard(torch.zeros(shape, dtype=dtype), dim=dim, timeout=TIMEOUT)


def shard(
    group: Any, *, shape: tuple[int, ...] = (1, 12, 12, 2), dim: int = 1, dtype: torch.dtype = torch.float32, **how: Any
) -> torch.Tensor:
    s = lr.Sharding(12, group, how.get("layout", "contiguous"))
    return s.shard(torch.zeros(shape, dtype=dtype, requires_grad=True), dim=dim, timeout=TIMEOUT)


def lose(group: Any, **words: Any) -> torch.Tensor:
    s = lr.Sharding(4 * transport_for(group).size, group, "contiguous")
    logits, targets = torch.zeros(1, 4, 3), torch.zeros(1, 4, dtype=torch.int64)
    return lr.nn.cross_entropy(logits, targets, sharding=s, timeout=TIMEOUT, **words)


def generate(group: Any, *, from_another: bool = False, **words: Any) -> torch.Tensor:
    """`from_another`: this rank has another model, which is found out at the end."""
    config, s = lr.models.DecoderConfig(vocab_size=11, dim=8, layers=1, heads=2), lr.Sharding(6, group)
    with ONE_DRAWS, torch.no_grad():
        torch.manual_seed(0)
        model = lr.models.Decoder(config, timeout=TIMEOUT)
        for parameter in model.parameters() if from_another else ():
            parameter.normal_()
    tokens = s.shard(torch.arange(6).unsqueeze(0))
    return model.generate(tokens, sharding=s, **{"new_tokens": 3, "temperature": 1.0, "seed": 7} | words)


def shard_batch(group: Any, *, shift: int = 0, layout: str = "zigzag", **words: Any) -> Any:
    from longring.integrations.transformers import shard_batch as function  # if transformers is installed

    ids = torch.arange(24).reshape(2, 12) + shift
    return function(ids, lr.Sharding(12, group, layout), timeout=TIMEOUT, **words)


def save(group: Any, *, folder: str = "run", step: int = 1, keep: int = 2) -> Any:
    return checkpoints.save(folder, step, {"x": torch.ones(2)}, about={}, keep=keep, group=group, timeout=TIMEOUT)


def find(group: Any, *, folder: str = "run") -> Any:
    return checkpoints.find(folder, group=group, timeout=TIMEOUT)


# ------------------------------------------------------------------------------------------------------- the cases


def called_module(q: Any, k: Any, v: Any, *, timeout: float, **words: Any) -> torch.Tensor:
    return lr.nn.Attention(lr.Dense(causal=False), timeout=timeout, schedule="ring")(q, k, v, **words)


def patterns(name: str, function: Callable[..., Any], usual: dict[str, Any], **changes: Any) -> list[Case]:
    """Words of a function that become its pattern."""
    usual = {"function": function, **usual}
    return [Case(f"{name}.{word}", "pattern", {word: value}, usual) for word, value in changes.items()]


def of_attention(argument: str, term: str, changes: dict[str, Any], **usual: Any) -> Case:
    plain = {"query_offset": 0, "pattern": lr.Dense(causal=False), "schedule": "ring"}
    return Case(f"attention.{argument}", term, changes, plain | usual)


ATTENTION = [
    of_attention("q", "batch", {"sizes": (2, 4, 2, 8)}),
    of_attention("q", "heads", {"sizes": (1, 8, 2, 8)}),
    of_attention("q", "head dimension", {"sizes": (1, 4, 2, 16)}, scale=0.3),
    of_attention("q", "dtype", {"dtype": torch.float64}),
    of_attention("q", "device", {"lies": {"device": "meta"}}),
    of_attention("k", "kv heads", {"sizes": (1, 4, 4, 8)}),
    of_attention("pattern", "pattern", {"pattern": lr.Dense(causal=True)}),
    of_attention("sharding", "length", {"n": 14}),
    of_attention("sharding", "how queries are dealt", {"layout": "striped"}),
    of_attention("sharding", "schedule", {"replicated": True, "schedule": "auto"}),
    of_attention("kv_sharding", "length of keys", {"n_k": 14}),
    of_attention("kv_sharding", "how keys are dealt", {"kv_layout": "striped"}),
    of_attention("layout", "how queries are dealt", {"layout": "striped"}, by_group=True),
    of_attention("group", "ranks of a node", {"node_ranks": 1}),
    of_attention("query_offset", "query offset", {"query_offset": 1}),
    of_attention("schedule", "schedule", {"schedule": "gather"}),
    of_attention("scale", "scale", {"scale": -0.3}, scale=0.3),
    of_attention("deterministic", "deterministic", {"deterministic": True}),
    *patterns("Attention.forward", called_module, {}, causal=True, documents=[0, 5, 12], lengths=[11]),
    *patterns(
        "ring_attention",
        lr.ring_attention,
        {"causal": False},
        causal=True,
        window=(5, 5),
        documents=[0, 5, 12],
        lengths=[11],
    ),
    *patterns(
        "dilated_attention",
        lr.dilated_attention,
        {"segment_lengths": [4, 12], "dilation_rates": [1, 2], "sizes": (1, 4, 4, 8)},
        segment_lengths=[6, 12],
        dilation_rates=[1, 1],
        causal=False,
        phase="block",
        documents=[0, 5, 12],
        mixing_gradient=False,
        compat="torchscale",
    ),
]


def of_rows(function: str, along: dict[str, Any], wider: tuple[int, ...], other: str) -> list[Case]:
    """Of `shard` and `unshard`, where `other` is another call at the same time."""
    return [
        Case(f"{function}.x", "dtype", {"dtype": torch.float64}),
        Case(f"{function}.x", "shape of a token", {"shape": wider}),
        Case(f"{function}.x", "device", {"lies": {"device": "meta"}}),
        Case(f"{function}.dim", "dim", along),
        Case(f"{function}.self", "how tokens are dealt", {"layout": "zigzag"}),
        Case(f"{function}.self", "call", {"instead": other}),
    ]


DRAWN = {"new_tokens": 4, "temperature": 1.5, "top_k": 3, "top_p": 0.9, "seed": 8, "end": 5}
ANOTHER_CALL = Case("attention.q", "call", {"instead": "unshard"}, ATTENTION[0].usual)
ANOTHER_BACKWARD = Case("attention.q", "call", {"instead": "gradient of shard"}, ATTENTION[0].usual)
KINDS = {
    "attention, forward": Kind(attend, [*ATTENTION, ANOTHER_CALL]),
    "attention, backward": Kind(attend, [*ATTENTION, ANOTHER_BACKWARD], in_backward=True),
    "unshard": Kind(
        unshard,
        of_rows("Sharding.unshard", {"dim": 2, "shape": (1, 2, 4)}, (1, 4, 3), "attention, forward"),
    ),
    "gradient of shard": Kind(
        shard,
        of_rows("Sharding.shard", {"dim": 2}, (1, 12, 12, 3), "attention, backward"),
        in_backward=True,
    ),
    "loss": Kind(
        lose,
        [
            Case("cross_entropy.gradients", "gradients", {"gradients": "mean"}),
            Case("cross_entropy.ignore_index", "ignore_index", {"ignore_index": -1}),
        ],
    ),
    "generate": Kind(
        generate,
        [
            *(Case(f"generate.{name}", name, {name: value}) for name, value in DRAWN.items()),
            Case("generate.sharding", "call", {"instead": "unshard"}),
        ],
    ),
    "generate, at its end": Kind(
        generate,
        [Case("generate.self", "tokens", {"from_another": True})],
        after="generate",
    ),
    "planning the checkpoint of step 1": Kind(
        save,
        [
            Case("save.step", "call", {"step": 2}),
            Case("save.folder", "folder", {"folder": "elsewhere"}),
            Case("save.keep", "keep", {"keep": 3}),
        ],
    ),
    "looking for checkpoints in run": Kind(find, [Case("find.folder", "call", {"folder": "elsewhere"})]),
}
LABELS, MASK = torch.arange(24).reshape(2, 12), torch.ones(2, 12, dtype=torch.int64)
if importlib.util.find_spec("transformers") is not None:
    KINDS["shard_batch"] = Kind(
        shard_batch,
        [
            Case("shard_batch.input_ids", "input_ids", {"shift": 1}),
            Case("shard_batch.labels", "labels", {"labels": LABELS.flip(1)}, {"labels": LABELS}),
            Case("shard_batch.attention_mask", "attention_mask", {"attention_mask": MASK.tril(8)}),
            Case("shard_batch.documents", "documents", {"documents": [0, 5, 12]}),
            Case("shard_batch.sharding", "how tokens are dealt", {"layout": "striped"}),
            Case("shard_batch.ignore_index", "ignore_index", {"ignore_index": -1}),
            Case("shard_batch.sharding", "call", {"instead": "unshard"}),
        ],
    )
PASSED_ON = ("ring_attention", "dilated_attention", "Attention.forward")  # what they share with attention is its

# what a rank may give as it likes, and why
LOCAL = {
    "attention.v": "has the shape of k, which every rank checks of its own",
    "attention.kernel": "each computes its part exactly, by whatever its machine has",
    "attention.return_lse": "lse is computed in any case",
    "attention.timeout": "how long this rank waits",
    "ring_attention.schedule": "only the ring",
    "Sharding.shard.timeout": "how long this rank waits",
    "Sharding.unshard.timeout": "how long this rank waits",
    "cross_entropy.logits": "this rank's, of any number of tokens",
    "cross_entropy.targets": "this rank's, of any number of tokens",
    "cross_entropy.sharding": "ranks of a mesh have several; of it only this rank's number of tokens matters",
    "cross_entropy.group": "another group is another call",
    "cross_entropy.timeout": "how long this rank waits",
    "generate.tokens": "this rank's; what comes of them is compared at the end",
    "shard_batch.timeout": "how long this rank waits",
    "save.state": "of plain values one rank's is written",
    "save.about": "rank 0's is kept",
    "save.group": "another group is another call",
    "save.per_rank": "each rank's own",
    "save.timeout": "how long this rank waits",
    "find.group": "another group is another call",
    "find.timeout": "how long this rank waits",
}


# ----------------------------------------------------------------------------------------------------- on one rank


class Heard:
    """A rank's transport that notes the terms of every call, and lies about some of them."""

    def __init__(self, transport: Any, lies: dict[str, Any], node_ranks: int | None) -> None:
        self.transport, self.lies = transport, lies
        self.rank, self.size, self.members = transport.rank, transport.size, transport.members
        self.node_ranks = transport.node_ranks if node_ranks is None else node_ranks
        self.decline = transport.decline
        self.terms: dict[str, set[str]] = {}

    def converse(self, terms: Any, *, timeout: float | None = None) -> Any:
        terms = {name: self.lies.get(name, value) for name, value in terms.items()}
        self.terms.setdefault(terms["call"], set()).update(terms)
        if isinstance(self.transport, ProcessGroupTransport):  # which says itself how many are close
            self.transport._node_ranks = self.node_ranks
        return self.transport.converse(terms, timeout=timeout)


def usual_calls(name: str, group: Any) -> dict[str, set[str]]:
    """All ranks make the calls of a kind alike, with their backward: what is compared, by the name of the call."""
    kind, heard = KINDS[name], Heard(transport_for(group), {}, None)
    found = kind.call(heard, **kind.cases[0].usual)
    if kind.in_backward:
        found.sum().backward()
    return heard.terms


def differing(name: str, number: int, group: Any, *, odd: int) -> tuple[str, str, float]:
    """What this rank hears of a case, and after how many seconds: (type, text, seconds)."""
    kind, transport = KINDS[name], transport_for(group)
    case = kind.cases[number]
    changes = dict(case.changes)
    lies, node_ranks = changes.pop("lies", {}), changes.pop("node_ranks", None)
    other = KINDS[changes.pop("instead", name)]
    words = {**case.usual, **changes} if other is kind else other.cases[0].usual
    mine = functools.partial(kind.call, Heard(transport, {}, None), **case.usual)
    its = functools.partial(other.call, Heard(transport, lies, node_ranks), **words)
    if kind.in_backward:  # every rank makes both calls, and goes back through one of them
        mine, its = (loss.backward for loss in [call().sum() for call in (mine, its)])
    began = time.monotonic()
    try:
        (its if transport.rank == odd else mine)()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", time.monotonic() - began


def differing_in_processes(group: Any, name: str, folder: str) -> list[tuple[str, str, float]]:
    """Every case of a kind, in a group of its own."""
    os.chdir(folder)
    numbers = range(len(KINDS[name].cases))
    return [differing(name, number, dist.new_group(), odd=1) for number in numbers]


def compared_in_processes(group: Any, folder: str) -> dict[str, set[str]]:
    """Of every kind of call, what the transport hands to the comparison."""
    from longring.transport import process_group

    os.chdir(folder)
    compared: dict[str, set[str]] = {}
    signed = process_group.signed

    def noted(facts: Mapping[str, Any]) -> Any:
        compared.setdefault(str(facts.get("call")), set()).update(facts)
        return signed(facts)

    process_group.signed = noted
    for name in KINDS:
        usual_calls(name, group)
    return compared
