"""The scenarios on ranks: which cases each of them has, by what the user asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import ArgumentError
from ...geometry.patterns import Dense, Dilated
from ..gpu.given import Shape
from .case import Case, Contender
from .seats import ALONE, CONTEXT_PARALLEL, DATA_PARALLEL, DEEPSPEED, FKODOM, ONE_PROCESS, TORCHSCALE

K = 1 << 10
CAUSAL = Dense(causal=True)


@dataclass(frozen=True)
class Wish:
    """What is asked for; presets have one each, and options change it."""

    tokens: tuple[int, ...] = (4 * K,)
    ranks: tuple[int, ...] = (1, 2, 4)
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    dtype: str = "fp32"
    pattern: Dense = CAUSAL
    dilated: Dilated | None = None  # None: three branches, by the length
    seed: int = 0
    rounds: int = 7
    budget: float = 60.0
    peers: Path | None = None

    def shape(self, tokens: int) -> Shape:
        return Shape(tokens, self.heads, self.kv_heads, self.head_dim)

    def case(self, scenario: str, tokens: int, ranks: int, contenders: list[Contender], **more: object) -> Case:
        options = {"pattern": self.pattern, "baseline": contenders[0].name, **more}
        return Case(
            scenario,
            self.shape(tokens),
            ranks,
            contenders=tuple(contenders),
            dtype=self.dtype,
            seed=self.seed,
            rounds=self.rounds,
            budget=self.budget,
            peers=self.peers,
            **options,  # type: ignore[arg-type]
        )

    @property
    def layout(self) -> str:
        """That balances the work."""
        return "zigzag" if self.pattern.causal and self.pattern.window is None else "contiguous"

    def baseline(self) -> Contender:
        """torch's own attention; it computes no windows, and there we are our own."""
        return Contender(ONE_PROCESS, "kernel") if self.pattern.window is None else Contender(ALONE)


PRESETS = {
    "usual": Wish(),
    "report": Wish(tokens=(4 * K, 8 * K, 16 * K, 32 * K, 64 * K), rounds=5, budget=120.0),
}
QUICK = {"tokens": (512,), "ranks": (1, 2), "rounds": 3, "budget": 5.0}


def schedules(wish: Wish) -> Iterator[Case]:
    """Every schedule, beside torch in one process and those of others."""
    for tokens in wish.tokens:
        for ranks in wish.ranks:
            if ranks > 1:
                yield wish.case("schedules", tokens, ranks, [wish.baseline(), *_schedules(wish, ranks), *_others(wish)])


def _schedules(wish: Wish, ranks: int) -> list[Contender]:
    one_node = ("ring", "bidirectional", "exchange", "ulysses", "gather")
    found = [Contender("longring, auto", layout=wish.layout)]
    found += [_ours(name, wish.layout) for name in one_node]
    if ranks >= 4 and ranks % 2 == 0:
        found += [_ours(name, wish.layout, nodes=2) for name in ("double_ring", "hybrid")]
    return found


def _ours(schedule: str, layout: str, *, nodes: int = 1, kernel: str = "auto") -> Contender:
    return Contender(f"longring {schedule}", "ours", schedule, layout, kernel, nodes)


def _others(wish: Wish) -> list[Contender]:
    if wish.pattern.window is not None:
        return []
    return [Contender(name, "package") for name in (DEEPSPEED, CONTEXT_PARALLEL)] + [Contender(DATA_PARALLEL, "kernel")]


def layouts(wish: Wish) -> Iterator[Case]:
    """A ring over each layout."""
    for tokens in wish.tokens:
        for ranks in wish.ranks:
            if ranks > 1:
                found = [
                    Contender(f"longring ring, {layout}", "ours", "ring", layout)
                    for layout in ("zigzag", "contiguous", "striped")
                ]
                yield wish.case("layouts", tokens, ranks, [wish.baseline(), *found])


def kernels(wish: Wish) -> Iterator[Case]:
    """Our kernels on one rank, beside torch's attention by itself."""
    for tokens in wish.tokens:
        found = [
            Contender(f"longring, {kernel}", "ours", "ring", "contiguous", kernel) for kernel in ("sdpa", "reference")
        ]
        yield wish.case("kernels", tokens, 1, [wish.baseline(), *found])


def dilated(wish: Wish) -> Iterator[Case]:
    """LongNet's attention, on ranks and beside others' code."""
    for tokens in wish.tokens:
        pattern = wish.dilated or _branches(tokens, wish.pattern.causal)
        for ranks in wish.ranks:
            found = [Contender(ALONE), *(_ours(name, "contiguous") for name in ("exchange", "ring"))]
            if ranks == 1:
                theirs = replace(pattern, phase="block")
                found += [Contender(TORCHSCALE, "package", pattern=theirs), Contender(FKODOM, "package")]
            yield wish.case("dilated", tokens, ranks, found, pattern=pattern)


def _branches(tokens: int, causal: bool) -> Dilated:
    shortest = max(1, tokens // 8)
    return Dilated((shortest, 4 * shortest, 8 * shortest), (1, 2, 4), causal=causal)


def report(wish: Wish) -> Iterator[Case]:
    """The classic table: what people do today, and what we do instead."""
    for tokens in wish.tokens:
        for ranks in wish.ranks:
            ours = [_ours(name, wish.layout) for name in ("ring", "ulysses", "gather")]
            others = [Contender(DEEPSPEED, "package"), Contender(DATA_PARALLEL, "kernel")]
            others = others if wish.pattern.window is None else []
            yield wish.case("report", tokens, ranks, [wish.baseline(), *ours, *others])


SCENARIOS: dict[str, Callable[[Wish], Iterator[Case]]] = {
    "schedules": schedules,
    "layouts": layouts,
    "kernels": kernels,
    "dilated": dilated,
    "report": report,
}
OF_PRESET = {"usual": ("schedules", "layouts", "kernels", "dilated"), "report": ("report",)}


def cases(preset: str, wish: Wish, only: tuple[str, ...] = ()) -> list[Case]:
    """Of the scenarios of the preset, or of those that are named."""
    for name in only:
        if name not in SCENARIOS:
            raise ArgumentError(f"--only must be one of {', '.join(SCENARIOS)}, got {name!r}")
    found = [case for name in only or OF_PRESET[preset] for case in SCENARIOS[name](wish)]
    if not found:
        raise ArgumentError(f"nothing is left to run: {', '.join(only)} compares ranks, and --ranks is {wish.ranks[0]}")
    return found
