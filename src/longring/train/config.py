"""What a training run is: one frozen value, from flags and at most one TOML file, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..geometry.layouts import LAYOUTS
from ..geometry.patterns import Dense, Dilated, Pattern
from ..geometry.plans import PLANS
from ..plan.quantities import count, split_branches, spoken_count
from ..plan.user_files import read_toml

TASKS = ("language", "passkey")
MODELS = ("decoder", "longnet")
DTYPES = ("bf16", "fp32", "fp64")
DEVICES = ("auto", "cpu", "cuda")
ROTARY_BASE = 10_000.0
MANY = 1_000_000  # ranks, layers or heads: more of them is a slip of the keyboard

SEQUENCES = 2**20  # of a step: each of them is read, whatever a checkpoint says

# What nobody said, by device: sizes that show something on a few cores in minutes, and ones that a GPU notices.
USUAL = {
    "cpu": {"context": 4096, "dim": 128, "layers": 4, "heads": 4, "dtype": "fp32"},
    "cuda": {"context": 65536, "dim": 512, "layers": 8, "heads": 8, "dtype": "bf16"},
}

SIZES = ("context_ranks", "node_ranks", "ranks", "dim", "layers", "heads", "kv_heads", "feedforward", "window")
TIMES = ("steps", "batch", "micro_batch", "save_every", "keep", "digits")
COUNTS = dict.fromkeys((*SIZES, *TIMES), 1) | {"context": 2, "seed": 0, "warmup": 0}
"""The least that each whole number may be; all of them may be written as people do: 64K, 1Mi."""

RATES = {"learning_rate": 0.0, "rotary_base": 1.0}  # must be above
SHORTEST_WAIT, LONGEST_WAIT = 0.1, 1e7  # seconds: below, ranks cannot even meet; above, a socket cannot be told
DIGITS = 5
NEAR = 2048  # tokens of the shortest segments that LongNet has by itself
SHARES = {"weight_decay": 0.0, "clip": 0.0, "final_rate": 0.0}  # must be at least
CHOICES = {
    "task": TASKS,
    "model": MODELS,
    "layout": ("auto", *LAYOUTS),
    "schedule": ("auto", *PLANS),
    "dtype": DTYPES,
    "device": DEVICES,
}

OF_THE_WEIGHTS = ("model", "dim", "layers", "heads", "kv_heads", "feedforward", "window", "dilated", "rotary_base")
OF_THE_ORDER = ("task", "digits", "context", "seed")
"""What a run that goes on must have in common with its checkpoint; ranks, layout, schedule and the rest may change."""


@dataclass(frozen=True)
class Config:
    """A training run. What is None is settled by the device, the data or the number of ranks: see `settled`.

    data, kind:      a file or folder, and what is in it; the Python standard library's source unless said. `case`
                     is of FASTA's letters. As `longring.train.corpus.open_corpus` takes them.
    task:            "language": to predict the next token of documents. "passkey": to find a key that is planted in a
                     text, of words or of what is in `data`, as `longring.train.retrieval.Passkeys` draws it; a key
                     has so many `digits`.
    out:             the run's folder: metrics, checkpoints, picture.
    weights:         another run's folder, whose newest weights this one begins with.
    context:         tokens of a sequence, dealt over `context_ranks` of the `ranks`; the others hold other sequences.
    node_ranks:      ranks of a context that are close to each other, for hybrid and double_ring.
    window, dilated: attention no further than that, or LongNet's branches as LENGTH:RATE,...
    rotary_base:     of the decoder's rotary positions; the larger, the more of them hardly turn over a long context.
    batch:           sequences of a step, over all ranks; micro_batch of them go through a ring at a time.
    warmup:          steps in which the learning rate rises; then it falls as a cosine to final_rate of it.
    dtype:           of matrix products and attention (bf16 by autocast); weights are float32, or float64 with fp64.
    clip:            the norm that gradients are cut down to; 0 for none.
    restart_if_damaged: whether to begin at step 1 where all checkpoints of the run are damaged, which is else refused.
    timeout:         seconds after which a silent rank is an error.
    """

    data: str | None = None
    kind: str = "auto"
    case: str = "kept"
    task: str = "language"
    digits: int = DIGITS
    out: str = "out/train"
    weights: str | None = None
    context: int | None = None
    ranks: int | None = None
    context_ranks: int | None = None
    node_ranks: int | None = None
    model: str = "decoder"
    dim: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    feedforward: int | None = None
    window: int | None = None
    dilated: str | None = None
    rotary_base: float | None = None
    layout: str = "auto"
    schedule: str = "auto"
    kernel: str = "auto"
    dtype: str | None = None
    device: str = "auto"
    steps: int = 100
    batch: int | None = None
    micro_batch: int = 1
    learning_rate: float = 1e-3
    warmup: int | None = None
    final_rate: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    fsdp: bool = False
    activation_checkpointing: bool = False
    save_every: int = 50
    keep: int = 3
    restart_if_damaged: bool = False
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name), is_optional=field.default is None)
        if self.window is not None and (self.dilated is not None or self.model == "longnet"):
            raise ArgumentError(f"{spelt('window')} is for dense attention; leave it out, or take --model decoder")
        if self.task != "passkey" and self.digits != DIGITS:
            raise ArgumentError(f"{spelt('digits')} is for --task passkey; leave it out")
        if self.rotary_base is not None and self.model == "longnet":
            raise ArgumentError(f"{spelt('rotary_base')} is for --model decoder; leave it out")
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise ArgumentError(f"--heads must be a multiple of --kv-heads, got {self.heads} and {self.kv_heads}")
        if self.dim and self.heads and self.dim % (2 * self.heads):
            raise ArgumentError(
                f"--dim must be a multiple of twice --heads, since positions turn pairs of numbers; "
                f"got {self.dim} and {self.heads}"
            )
        if self.warmup is not None and self.warmup > self.steps:
            raise ArgumentError(f"--warmup must be at most --steps, got {self.warmup} and {self.steps}")
        if self.dilated is not None:
            branches(self.dilated)

    def settled(self, *, device: str, ranks: int) -> Config:
        """The same run on this device ("cpu" or "cuda") and so many ranks, with nothing left open."""
        context_ranks = self.context_ranks or ranks
        if ranks % context_ranks:
            raise ArgumentError(f"--context-ranks must divide the ranks, got {context_ranks} of {ranks}")
        data_ranks = ranks // context_ranks
        if self.node_ranks is not None and context_ranks % self.node_ranks:
            raise ArgumentError(
                f"--node-ranks must divide the ranks of a context, got {self.node_ranks} and {context_ranks}"
            )
        found: dict[str, Any] = {name: value for name, value in USUAL[device].items() if getattr(self, name) is None}
        found |= {"device": device, "ranks": ranks, "context_ranks": context_ranks}
        whole = replace(self, **found)
        found = {
            "data": None if whole.data is None else os.path.abspath(whole.data),  # found again from other folders
            "kv_heads": whole.kv_heads or whole.heads,
            "feedforward": whole.feedforward or usual_feedforward(whole.model, whole.dim),
            "batch": whole.batch or data_ranks * whole.micro_batch,
            "warmup": max(1, whole.steps // 10) if whole.warmup is None else whole.warmup,
            "dilated": whole.dilated or (usual_branches(whole.context) if whole.model == "longnet" else None),
            "rotary_base": whole.rotary_base or (ROTARY_BASE if whole.model == "decoder" else None),
        }
        whole = replace(whole, **found)
        assert whole.batch is not None
        if whole.batch % (data_ranks * whole.micro_batch):
            raise ArgumentError(
                f"--batch must be a multiple of data ranks times --micro-batch, got {whole.batch} and "
                f"{data_ranks} x {whole.micro_batch}"
            )
        return whole

    @property
    def data_ranks(self) -> int:
        """Rings, each with sequences of its own; of a settled config."""
        assert self.ranks is not None
        assert self.context_ranks is not None
        return self.ranks // self.context_ranks

    def pattern(self, documents: Any = None) -> Pattern:
        """Which tokens attend to which."""
        if self.dilated is None:
            window = None if self.window is None else (self.window - 1, 0)
            return Dense(window=window, documents=documents)
        lengths, rates = zip(*branches(self.dilated), strict=True)
        return Dilated(segment_lengths=lengths, dilation_rates=rates, documents=documents)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def spelt(name: str) -> str:
    """As a flag."""
    return "--" + name.replace("_", "-")


def read(flags: Mapping[str, Any], toml: Path | None = None) -> Config:
    """What a file says, and what flags say, which win. A flag that is None was not given."""
    told = {} if toml is None else _of_file(toml)
    return Config(**{name: _read(name, value) for name, value in {**told, **_given(flags)}.items()})


def differences(config: Config, was: Config, names: Iterable[str]) -> list[str]:
    """What a settled config says otherwise than another one that was saved, in words."""
    pairs = [(name, getattr(was, name), getattr(config, name)) for name in names]
    return [f"{spelt(name)} was {before} and is {now}" for name, before, now in pairs if before != now]


def branches(text: str) -> list[tuple[int, int]]:
    """(segment length, dilation rate) of each of LongNet's branches in "2048:1,4096:2"."""
    found = []
    for part in split_branches(text):
        length, colon, rate = part.strip().partition(":")
        if not colon:
            raise ArgumentError(f"--dilated takes LENGTH:RATE pairs, as 2048:1,4096:2, got {part[:100]!r}")
        found.append((count(length, of="a segment length of --dilated"), count(rate, of="a rate of --dilated")))
    return found


def usual_branches(context: int | None) -> str:
    """Near tokens all, far ones more and more thinly: LongNet's habit at any length.

    In long contexts segments and rates grow alike, so that the work grows as the context does, and not as its square.
    """
    assert context is not None
    if context <= 8 * NEAR:
        return ",".join(f"{max(1, context // part)}:{rate}" for part, rate in ((8, 1), (2, 2), (1, 4)))
    rates = [1]
    while NEAR * rates[-1] < context:
        rates.append(4 * rates[-1])
    return ",".join(f"{min(context, NEAR * rate)}:{rate}" for rate in rates)


def usual_feedforward(model: str, dim: int | None) -> int:
    """The width inside a layer that the models have by themselves."""
    assert dim is not None
    return 4 * dim if model == "longnet" else -(-8 * dim // 3 // 64) * 64


# ------------------------------------------------------------------------------------------------------- reading


def _of_file(path: Path) -> dict[str, Any]:
    told = read_toml(path, f"--config {path}")
    found: dict[str, Any] = {}
    for name, value in told.items():
        if isinstance(value, dict):
            raise ArgumentError(
                f"--config {path}: [{name}] is a table, and none are taken; settings stand on their own"
            )
        known = _known(name, path)
        if known in found:
            raise ArgumentError(f"--config {path}: {known} is said twice, with - and with _; leave one of them out")
        found[known] = value
    return found


def _known(name: str, path: Path) -> str:
    names = [field.name for field in fields(Config)]
    plain = name.replace("-", "_")
    if plain in names:
        return plain
    near = get_close_matches(plain, names, n=1)
    meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
    raise ArgumentError(f"--config {path}: no such setting, {name!r}; {meant}")


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _read(name: str, value: Any) -> Any:
    if name in COUNTS and isinstance(value, str):
        return count(value, of=spelt(name), least=COUNTS[name])
    if (name in RATES or name in SHARES or name == "timeout") and type(value) is int:
        return float(value)
    return str(value) if isinstance(value, Path) else value


def _check(name: str, value: Any, *, is_optional: bool) -> None:
    if value is None and is_optional:
        return
    if name in COUNTS:
        if type(value) is not int or value < COUNTS[name]:
            raise ArgumentError(f"{spelt(name)} must be a whole number of at least {COUNTS[name]}, got {value!r}")
        if name in ("ranks", "layers", "heads", "keep") and value > MANY:
            raise ArgumentError(f"{spelt(name)} must be at most {spoken_count(MANY)}, got {value:,}")
        if name in ("batch", "micro_batch") and value > SEQUENCES:
            raise ArgumentError(f"{spelt(name)} must be at most {SEQUENCES:,}, got {value:,}")
    elif name == "timeout":
        if type(value) is not float or not SHORTEST_WAIT <= value <= LONGEST_WAIT:
            least, most = f"{SHORTEST_WAIT:g}", f"{LONGEST_WAIT:,.0f}"
            raise ArgumentError(f"{spelt(name)} must be {least} to {most} seconds, got {value!r}")
    elif name in RATES or name in SHARES:
        least = RATES[name] if name in RATES else SHARES[name]
        if type(value) is not float or not least <= value < float("inf") or (name in RATES and value == least):
            words = "above" if name in RATES else "of at least"
            raise ArgumentError(f"{spelt(name)} must be a number {words} {least:g}, got {value!r}")
        if name == "final_rate" and value > 1:
            raise ArgumentError(f"{spelt(name)} is what is left of the learning rate, so at most 1; got {value!r}")
    elif name in CHOICES:
        if value not in CHOICES[name]:
            raise ArgumentError(f"{spelt(name)} must be one of {', '.join(CHOICES[name])}; got {value!r}")
    elif name in ("fsdp", "activation_checkpointing", "restart_if_damaged"):
        if type(value) is not bool:
            raise ArgumentError(f"{spelt(name)} must be true or false, got {value!r}")
    elif not isinstance(value, str) or not value or "\0" in value:
        raise ArgumentError(f"{spelt(name)} must be a text, got {value!r}")
