"""What a run was asked to do, read back from its record: enough to make the very plan again that it followed."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import Any

from ...errors import LongringError
from ...geometry.layouts import deal
from ...geometry.patterns import Dense, Dilated, Pattern, Problem
from ...geometry.plans import PLANS
from ...geometry.task import Task
from ...plan.choose import choose_layout
from ...plan.quantities import count

BY_HEADS = ("ulysses", "hybrid")
BY_NODES = ("double_ring", "hybrid")


@dataclass(frozen=True)
class Asked:
    """One call of attention over ranks."""

    pattern: Pattern
    tokens: int
    ranks: int
    layout: str
    schedule: str
    nodes: int = 1
    kv_heads: int = 1
    heads: int = 0

    @property
    def task(self) -> Task:
        documents = getattr(self.pattern, "documents", None) if self.layout == "dealt" else None
        layout = deal(self.layout, self.tokens, self.ranks, documents=documents)
        return Task(self.pattern, Problem(1, self.tokens, self.tokens, self.kv_heads, 0), layout, layout, self.heads)

    @property
    def node_ranks(self) -> int:
        return max(1, self.ranks // self.nodes)

    @property
    def words(self) -> str:
        return f"{spoken_pattern(self.pattern)}, {self.schedule} schedule, {self.layout} layout"


def asked(arguments: Any, *, layout: Any = None, schedule: Any = None, tokens: Any = None, ranks: Any = None) -> Asked:
    """From the arguments in a record; what its own rows say better stands in the place of `auto`."""
    given = arguments if isinstance(arguments, dict) else {}
    length, world = count(tokens or given.get("tokens") or 0), count(ranks or given.get("ranks") or 1)
    pattern = pattern_of(given)
    kv_heads = given.get("kv_heads") or given.get("heads") or 1
    return Asked(
        pattern,
        length,
        world,
        layout=_named(layout, given.get("layout")) or choose_layout(pattern, length)[0],
        schedule=_known(_named(schedule, given.get("schedule")), pattern),
        nodes=given.get("nodes") or 1,
        kv_heads=kv_heads,
        heads=given.get("heads") or kv_heads,
    )


def _named(*names: Any) -> str | None:
    return next((name for name in names if isinstance(name, str) and name != "auto"), None)


def _known(schedule: str | None, pattern: Pattern) -> str:
    if schedule is not None and schedule not in PLANS:
        raise LongringError(f"no plan of a schedule {schedule!r} can be drawn")
    return schedule or ("ring" if isinstance(pattern, Dense) and pattern.window is None else "exchange")


def pattern_of(arguments: dict[str, Any]) -> Pattern:
    """As the command line has them: causal, window, dilated (text, or pairs of length and rate); or written out."""
    if isinstance(arguments.get("pattern"), str) and "(" in arguments["pattern"]:
        return _written_out(arguments["pattern"])
    causal = bool(arguments.get("causal", True))
    if branches := arguments.get("dilated"):
        pairs = [pair.split(":") for pair in branches.split(",")] if isinstance(branches, str) else branches
        return Dilated([count(w) for w, _ in pairs], [count(r) for _, r in pairs], causal=causal)
    window = arguments.get("window")
    if window is None:
        return Dense(causal=causal)
    left = count(window) - 1
    return Dense(causal=causal, window=(left, 0 if causal else left))


def _written_out(text: str) -> Pattern:
    """Dense(causal=True, ...) or Dilated(...), read without being run."""
    try:
        match ast.parse(text, mode="eval").body:
            case ast.Call(func=ast.Name(id="Dense" | "Dilated" as name), args=[], keywords=words):
                values = {word.arg or "": ast.literal_eval(word.value) for word in words}
                return (Dense if name == "Dense" else Dilated)(**values)
    except (SyntaxError, ValueError, TypeError) as failure:
        raise LongringError(f"the record's pattern {text!r} cannot be read") from failure
    raise LongringError(f"the record's pattern {text!r} cannot be read")


def spoken_pattern(pattern: Pattern) -> str:
    if isinstance(pattern, Dilated):
        branches = ", ".join(f"{w:,}:{r}" for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True))
        block = ", block phases" if pattern.phase == "block" else ""
        return f"{'causal' if pattern.causal else 'full'} dilated attention (segments and rates {branches}{block})"
    name = "causal attention" if pattern.causal else "full attention"
    if pattern.window is not None:
        name += " in a window"
    return name + (" inside documents" if pattern.documents is not None else "")


# --------------------------------------------------------------------------------------------- in small


SMALL_RANKS = 4


def in_small(run: Asked) -> Asked:
    """The same attention over so few tokens and ranks that each can be seen."""
    ranks = run.ranks if run.ranks <= 6 else SMALL_RANKS
    by_nodes = run.schedule in BY_NODES and run.nodes > 1
    if by_nodes and ranks % 2:
        ranks = SMALL_RANKS
    tokens = 16 * ranks if ranks > 1 else 32
    heads = ranks if run.schedule in BY_HEADS else 2
    return replace(
        run,
        pattern=_small_pattern(run.pattern, tokens),
        tokens=tokens,
        ranks=ranks,
        nodes=2 if by_nodes else 1,
        kv_heads=heads,
        heads=heads,
    )


def _small_pattern(pattern: Pattern, tokens: int) -> Pattern:
    if isinstance(pattern, Dilated):
        branches = min(3, len(pattern.segment_lengths))
        lengths = [max(1, tokens >> (branches - 1 - index)) for index in range(branches)]
        return replace(pattern, segment_lengths=lengths, dilation_rates=[1 << index for index in range(branches)])
    left, right = pattern.window or (None, None)
    wide = max(1, tokens // 6)
    window = None if pattern.window is None else (None if left is None else wide, right and wide)
    documents = None if pattern.documents is None else [0, tokens // 9, tokens // 3, tokens // 2 + 3, tokens]
    return replace(pattern, window=window, documents=documents, lengths=None)
