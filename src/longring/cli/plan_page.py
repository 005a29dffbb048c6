"""The pages of `longring plan`: forecasts as tables that fit 100 columns, and what stands under them.

Printed plainly: what rich takes to load and to draw would be a fifth of the time of an answer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from textwrap import fill
from typing import TYPE_CHECKING

from ..geometry.patterns import Dense, Dilated
from ..plan.quantities import spoken_bytes, spoken_seconds
from .screen import WIDTH, shown

if TYPE_CHECKING:
    from ..plan.forecast import Auto, Choice, Fewest, Forecast, Longest, Pass, Question
    from ..plan.hardware import Hardware

ROUGH = (
    "On a GPU windows and documents are computed in fewer launches than is counted on here: their times may be 1.2 to "
    "3 times too long, and their copies and partial gradients up to 2.9 tensors too many. Bytes moved are exact."
)
COUNTED = (
    "Counted is attention: q, k, v, out, lse, gradients, buffers and workspaces of the layer at work, and what the "
    "other layers keep for their backward (q, k, v, out, lse). Weights, optimizer and the rest of a model are not: set "
    "room aside for them with --reserve."
)


def print_forecast(found: Forecast, *, begins_with: str = "", ends_with: str = "") -> None:
    best = found.recommended
    _print(*scene(found.question), "Predicted; nothing was run.", "")
    if begins_with:
        _print(begins_with, "")
    _print(f"Take {best.schedule}, {best.layout}: {found.reason}.", "", is_bold=True)
    if found.auto is not None and found.auto.schedule != best.schedule:
        _print(_auto(found.auto, best), "")
    work = (_tera(each.flops) for each in (best.forward, best.backward))
    _print("A layer is {} TFLOP forward and {} backward a rank, on average.".format(*work), "")
    _print_times(found)
    _print_moving(found)
    _print_holding(found, "forward")
    _print_holding(found, "backward")
    _print_parts(best)
    if ends_with:
        _print(ends_with, "")
    _print(*_small_print(found))


def print_lengths(question: Question, found: Sequence[Longest], at_best: Choice, left_out: Sequence[str]) -> None:
    best = found[0]
    _print(*scene(replace(question, tokens=best.tokens)), "Predicted; nothing was run.", "")
    rows = [
        (
            f"{one.schedule} {one.layout}",
            f"{'at least ' if one.is_at_least else ''}{one.tokens:,}",
            f"{one.tokens // question.ranks:,}",
            spoken_bytes(one.bytes_at),
            "not counted" if one.is_at_least else spoken_bytes(one.bytes_beyond),
        )
        for one in found
    ]
    headers = ("", "tokens", "a rank", "holds", f"with {best.granule:,} more")
    _print_table("The longest sequence that fits", headers, rows)
    about = "" if at_best.is_played else "about "
    layers = "" if question.layers == 1 else f", {spoken_seconds(at_best.step_seconds)} all {question.layers}"
    _print(
        f"At {best.tokens:,} tokens a layer of {best.schedule}, {best.layout} takes {about}"
        f"{spoken_seconds(at_best.forward.seconds)} forward and {spoken_seconds(at_best.backward.seconds)} backward"
        f"{layers}: {_tera(at_best.flops_per_second)} TFLOP/s a rank.",
        f"Every length was checked to fit into {spoken_bytes(question.memory_bytes)}, and, where it was counted, "
        f"{best.granule // question.ranks:,} tokens a rank more not to.",
        *(f"Left out: {line}." for line in left_out),
        COUNTED,
        *_rough(question),
    )


def print_hardware(known: dict[str, Hardware]) -> None:
    rows = []
    for one in known.values():
        dtype = next(iter(one.forward_flops))
        rates = (f"{_tera(rates[dtype])} {dtype}" for rates in (one.forward_flops, one.backward_flops))
        links = (f"{link.name} {link.bytes_per_second / 1e9:.3g}" for link in (one.inside, one.outside))
        rows.append((one.name, spoken_bytes(one.memory_bytes), *rates, *links, f"{one.ranks_per_node}"))
    headers = ("", "memory", "forward", "backward", "inside", "outside", "a node")
    _print_table("Hardware: attained TFLOP/s, links in GB/s one way", headers, rows)
    _print(*(f"{one.name}: {one.title}." for one in known.values()), "")
    _print("Every number with its source: --json. Your own: --hardware-file my.toml, see docs/plan.md.")


def _print(*lines: str, is_bold: bool = False) -> None:
    for line in lines:
        text = fill(shown(line), WIDTH)
        print(_bold(text) if is_bold and line else text)


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


def _rule() -> str:
    """A line where there are letters for it; Python speaks UTF-8 even where the locale asks for plain ASCII."""
    locale = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    try:
        "─".encode("ascii" if locale in ("C", "POSIX") else sys.stdout.encoding or "ascii")
    except UnicodeError:
        return "-"
    return "─"


def _print_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], bold: int | None = None) -> None:
    """Names to the left, numbers to the right; a header may have two lines."""
    body = [[shown(cell) for cell in row] for row in rows]
    heads = [header.rpartition("\n")[::2] for header in headers]
    lines = [[line for line, _ in heads], [line for _, line in heads], *body]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = ["  ".join(_cells(line, widths)).rstrip() for line in lines]
    print(_bold(title))
    print()
    for line in drawn[0 if drawn[0] else 1 : 2]:
        print(line)
    print(_rule() * (sum(widths) + 2 * (len(widths) - 1)))
    for number, line in enumerate(drawn[2:]):
        print(_bold(line) if number == bold else line)
    print()


def _cells(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    name, *numbers = line
    return [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))]


# ------------------------------------------------------------------------------------------------------- sentences


def scene(question: Question) -> list[str]:
    """What was asked, in words."""
    machine = question.hardware
    nodes = "" if question.nodes == 1 else f" on {question.nodes:,} nodes"
    links = machine.inside.name + (f", {machine.outside.name} between nodes" if question.nodes > 1 else "")
    batch = "" if question.batch == 1 else f"{question.batch} x "
    aside = f", {spoken_bytes(question.reserve_bytes)} of it set aside" if question.reserve_bytes else ""
    return [
        f"{batch}{_many(question.tokens, 'token')}, {_pattern(question)}, over {_many(question.ranks, 'rank')}{nodes}: "
        f"{question.local_tokens:,} a rank{_idle(question)}.",
        f"{question.heads} query and {_many(question.kv_heads, 'kv head')} of {question.head_dim}, {question.dtype}, "
        f"{_many(question.layers, 'layer')}.",
        f"{machine.title}; {links}; {spoken_bytes(machine.memory_bytes)} for tensors{aside}.",
    ]


def _idle(question: Question) -> str:
    """Of ranks that outnumber the tokens."""
    idle = question.ranks - question.tokens
    return f" at most, and {_many(idle, 'rank')} without any" if idle > 0 else ""


def _pattern(question: Question) -> str:
    pattern = question.pattern
    causal = "causal" if pattern.causal else "full"
    if isinstance(pattern, Dilated):
        return f"{causal}, dilated {','.join(f'{w}:{r}' for w, r in pattern.branches)}"
    if isinstance(pattern, Dense) and pattern.window is not None:
        return f"{causal}, window {(pattern.window[0] or 0) + 1:,}"
    return causal


def _tera(number: float) -> str:
    number /= 1e12
    return f"{number:,.0f}" if 100 <= number < 1e9 else f"{number:.3g}"


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def number(enough: Fewest) -> str:
    """How many ranks are enough."""
    question = enough.question
    if not enough.fewer:
        return f"1 rank is enough, by {enough.schedule}."
    return (
        f"{_many(question.ranks, 'rank')} on {_many(question.nodes, 'node')} are enough, by {enough.schedule}, "
        f"{enough.layout}. With {enough.fewer:,} the thriftiest would hold {spoken_bytes(enough.bytes_fewer)} of "
        f"{spoken_bytes(question.memory_bytes)} a rank."
    )


def _auto(auto: Auto, best: Choice) -> str:
    """What happens where nobody says which schedule to take."""
    lost = "as fast, by this forecast" if auto.is_as_good else f"{auto.slower:.0%} slower, by this forecast"
    return (
        f'Say schedule="{best.schedule}": schedule="auto", which estimates for {auto.machine}, would take '
        f"{auto.schedule}, {lost}."
    )


def length(question: Question, furthest: Longest) -> str:
    """How long a sequence may be."""
    by = f"by {furthest.schedule}, {furthest.layout}"
    if not furthest.tokens:
        return f"Not even {furthest.granule:,} tokens fit {by}."
    if furthest.is_at_least:
        return (
            f"At least {furthest.tokens:,} tokens fit {by}, {furthest.tokens // question.ranks:,} a rank, and hold "
            f"{spoken_bytes(furthest.bytes_at)} of {spoken_bytes(question.memory_bytes)}; longer ones are too many "
            "tiles to count at once: ask for them with --tokens."
        )
    rough = "" if question.asks_every_rank else " By one rank of them; --max-tokens asks more."
    return (
        f"The longest that fits {by}: {furthest.tokens:,} tokens, {furthest.tokens // question.ranks:,} a rank. "
        f"It holds {spoken_bytes(furthest.bytes_at)} of {spoken_bytes(question.memory_bytes)}; {furthest.granule:,} "
        f"tokens more do not fit.{rough}"
    )


def _small_print(found: Forecast) -> list[str]:
    asked = " and ".join(
        f"{rank} ({layout})" for layout, rank in {one.layout: one.asked for one in found.choices}.items()
    )
    exact = all(one.forward.traffic.is_exact for one in found.choices)
    counted = "to the byte" if exact else "some of its thousands of steps speaking for the others"
    told = [
        f"moved: by rank {asked}, {counted}; a step: the most of one. held: {_holder(found)}. balance: the most work "
        "of all ranks, over their mean. TFLOP/s of a rank, and efficiency (against one rank that could hold "
        "everything): forward and backward together.",
        "hides: forward/backward, whether less than 2 % of the time is waiting; from: tokens a rank from which on that "
        "is so, if computing grows by one power of them more than what is waited for.",
        *(f"Left out: {line}." for line in found.left_out),
        *_crowded(found.question),
        COUNTED,
        *_rough(found.question),
        f"Rates of {found.question.hardware.name}: {found.question.hardware.sources['forward_flops']}.",
    ]
    if not all(one.is_played for one in found.choices):
        told.insert(
            0,
            "~ is the sum over the steps of a few ranks, each step as long as computing or moving. What has no ~ was "
            "played, event by event, on a model of all ranks and links; --play-all plays every row.",
        )
    return told


def _crowded(question: Question) -> list[str]:
    """Nobody may have such a machine; but whoever has can plan for it."""
    usual = question.hardware.ranks_per_node
    if question.node_ranks <= usual:
        return []
    inside = question.hardware.inside.name
    return [
        f"{question.node_ranks:,} ranks share a node here, joined by {inside}; of {question.hardware.name} {usual} do."
    ]


def _rough(question: Question) -> list[str]:
    """Where the engine launches otherwise than is modelled."""
    pattern = question.pattern
    is_dense = not isinstance(pattern, Dense) or (pattern.window is None and pattern.documents is None)
    if is_dense or question.hardware.device != "cuda":
        return []
    return [ROUGH]


def _holder(found: Forecast) -> str:
    """Which of the ranks."""
    if found.question.asks_every_rank:
        return f"by the fullest rank, of {found.recommended.schedule} rank {found.recommended.memory.rank}"
    return (
        "by the same rank, than which others may hold more, up to twice as much where heads do not come out even; "
        "where that could be too much, by the fullest at both ends and around the middle"
    )


# ---------------------------------------------------------------------------------------------------------- tables


def _print_choices(found: Forecast, title: str, headers: Sequence[str], cells: Iterable[Sequence[str]]) -> None:
    names = (f"{one.schedule} {one.layout}" for one in found.choices)
    rows = ((name, *some) for name, some in zip(names, cells, strict=True))
    _print_table(title, ("", *headers), rows, bold=found.choices.index(found.recommended))


def _print_times(found: Forecast) -> None:
    layers = found.question.layers
    step = "both" if layers == 1 else f"{layers} layers"
    headers = ("forward", "backward", step, "TFLOP/s", "effi-\nciency", "balance", "holds", "fits")
    title = "Time of a layer, how well it is spent, and what a rank holds of all layers"
    _print_choices(found, title, headers, map(_time_cells, found.choices))


def _time_cells(one: Choice) -> list[str]:
    about = "" if one.is_played else "~"
    times = (one.forward.seconds, one.backward.seconds, one.step_seconds)
    return [
        *(about + spoken_seconds(seconds) for seconds in times),
        _tera(one.flops_per_second),
        f"{one.efficiency:.0%}",
        f"{one.balance:.2f}" if one.question.tokens >= one.question.ranks else "-",
        spoken_bytes(one.memory.peak_bytes),
        "yes" if one.fits else "no",
    ]


def _print_moving(found: Forecast) -> None:
    where = ("inside", "outside") if found.question.nodes > 1 else ("inside",)
    steps = (f"a step\n{place}" for place in where)
    headers = ("moved\nforward", "moved\nbackward", "messages", *steps, "hides", "from")
    title = "What a rank sends or receives for a layer, and whether computing hides it"
    _print_choices(found, title, headers, (_moving_cells(one, where) for one in found.choices))


def _moving_cells(one: Choice, where: Sequence[str]) -> list[str]:
    passes = one.forward, one.backward
    carried = [each.traffic.busier for each in passes]
    return [
        *(spoken_bytes(sum(some.bytes for some in each.values())) for each in carried),
        "/".join(f"{sum(some.messages for some in each.values())}" for each in carried),
        *(spoken_bytes(carried[0][place].most_bytes) for place in where),
        ("" if one.is_played else "~") + "/".join("yes" if each.is_hidden else "no" for each in passes),
        "/".join(_from(each) for each in passes),
    ]


def _from(one: Pass) -> str:
    if one.hides_from is None:
        return "-"
    for unit, size, least in (("M", 10**6, 10**7), ("K", 10**3, 10**5)):
        if one.hides_from >= least:
            return f"{one.hides_from / size:,.0f}{unit}"
    return f"{one.hides_from:,}"


OWN = {"q, k, v": ("q", "k", "v"), "out, lse,\ndout": ("out", "lse", "dout"), "dq, dk,\ndv": ("dq", "dk", "dv")}
WORKING = {"unmerged": ("partial results", "partial gradients"), "work-\nspace": ("kernel workspace",)}
TRAVELLING, BUFFERS = "moving\ndK/dV", "K/V etc.\nbuffers"


def grouped(components: dict[str, int]) -> dict[str, int]:
    """Components in a few groups, none left out."""
    named = {component: group for group, some in (OWN | WORKING).items() for component in some}
    found = dict.fromkeys((*OWN, TRAVELLING, *WORKING, BUFFERS), 0)
    for component, nbytes in components.items():
        other = TRAVELLING if component.startswith("dK/dV") else BUFFERS
        found[named.get(component, other)] += nbytes
    return found


def _print_holding(found: Forecast, phase: str) -> None:
    held = [one.memory.forward if phase == "forward" else one.memory.backward for one in found.choices]
    cells = [grouped(components) for components in held]
    groups = [group for group in cells[0] if any(each[group] for each in cells)]
    title = f"What a rank holds of a layer at its fullest moment, {phase}, in MiB"
    rows = ([*(_mib(each[group]) for group in groups), _mib(sum(each.values()))] for each in cells)
    _print_choices(found, title, (*groups, "all"), rows)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f}" if nbytes >= 2**20 or not nbytes else f"{nbytes / 2**20:.2g}"


def _print_parts(best: Choice) -> None:
    forward, backward, memory = best.memory.forward, best.memory.backward, best.memory
    components = [name for name in dict.fromkeys((*forward, *backward)) if forward.get(name) or backward.get(name)]
    rows = [(name, *(spoken_bytes(some.get(name, 0)) for some in (forward, backward))) for name in components]
    rows.append(("a layer at work", spoken_bytes(memory.forward_bytes), spoken_bytes(memory.backward_bytes)))
    if memory.layers > 1:
        kept = spoken_bytes((memory.layers - 1) * memory.saved_bytes)
        rows.append((f"kept by the {_many(memory.layers - 1, 'other')}", kept, kept))
    _print_table(f"Part by part: {best.schedule} {best.layout}", ("", "forward", "backward"), rows)
