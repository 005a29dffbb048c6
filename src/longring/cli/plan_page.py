"""The pages of `longring plan`: forecasts as tables that fit 100 columns, and what stands under them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..geometry.patterns import Dense, Dilated
from ..plan.forecast import A_BLOCK
from ..plan.quantities import spoken_bytes, spoken_seconds
from . import screen

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..plan.forecast import Choice, Fewest, Forecast, Longest, Pass, Question
    from ..plan.hardware import Hardware

COUNTED = (
    "Counted is attention: q, k, v, out, lse, gradients, buffers and workspaces of the layer at work, and what the "
    "other layers keep for their backward (q, k, v, out, lse). Weights, optimizer and the rest of a model are not: set "
    "room aside for them with --reserve."
)


def print_forecast(found: Forecast, *, begins_with: str = "", ends_with: str = "") -> None:
    console = screen.console()
    best = found.recommended
    _print(console, scene(found.question), "Predicted; nothing was run.", "")
    if begins_with:
        _print(console, begins_with, "")
    console.print(f"[bold]Take {best.schedule}, {best.layout}[/]: {found.reason}.\n")
    work = (_tera(each.flops) for each in (best.forward, best.backward))
    _print(console, "A layer is {} TFLOP forward and {} backward a rank, on average.".format(*work), "")
    for table in (
        _times(found),
        _moving(found),
        _holding(found, "forward"),
        _holding(found, "backward"),
        _parts(best),
    ):
        title, table.title = table.title, None  # which would be folded to the width of a narrow table
        console.print(f"[bold]{title}[/]")
        console.print(table)
    if ends_with:
        _print(console, ends_with, "")
    _print(console, *_small_print(found))


def print_lengths(question: Question, found: Sequence[Longest], at_best: Choice, left_out: Sequence[str]) -> None:
    console, best = screen.console(), found[0]
    _print(console, scene(replace(question, tokens=best.tokens)), "Predicted; nothing was run.", "")
    numbers = ("tokens", "a rank", "holds", f"with {best.granule:,} more")
    table = screen.table("The longest sequence that fits", "schedule", "layout", numbers=numbers)
    for one in found:
        needs = spoken_bytes(one.bytes_at), spoken_bytes(one.bytes_beyond)
        table.add_row(one.schedule, one.layout, f"{one.tokens:,}", f"{one.tokens // question.ranks:,}", *needs)
    console.print(table)
    about = "" if at_best.is_played else "about "
    layers = "" if question.layers == 1 else f", {spoken_seconds(at_best.step_seconds)} all {question.layers}"
    _print(
        console,
        f"At {best.tokens:,} tokens a layer of {best.schedule}, {best.layout} takes {about}"
        f"{spoken_seconds(at_best.forward.seconds)} forward and {spoken_seconds(at_best.backward.seconds)} backward"
        f"{layers}: {_tera(at_best.flops_per_second)} TFLOP/s a rank.",
        f"Every length was checked to fit into {spoken_bytes(question.memory_bytes)}, and {A_BLOCK} tokens a rank more "
        "not to.",
        *(f"Left out: {line}." for line in left_out),
        COUNTED,
    )


def print_hardware(known: dict[str, Hardware]) -> None:
    console = screen.console()
    numbers = ("memory", "forward", "backward", "inside", "outside", "a node")
    table = screen.table("Hardware: attained TFLOP/s, links in GB/s one way", "name", numbers=numbers)
    for one in known.values():
        dtype = next(iter(one.forward_flops))
        rates = (f"{_tera(rates[dtype])} {dtype}" for rates in (one.forward_flops, one.backward_flops))
        links = (f"{link.name} {link.bytes_per_second / 1e9:.3g}" for link in (one.inside, one.outside))
        table.add_row(one.name, spoken_bytes(one.memory_bytes), *rates, *links, f"{one.ranks_per_node}")
    console.print(table)
    _print(console, *(f"{one.name}: {one.title}." for one in known.values()), "")
    _print(console, "Every number with its source: --json. Your own: --hardware-file my.toml, see docs/plan.md.")


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False)


# ------------------------------------------------------------------------------------------------------- sentences


def scene(question: Question) -> str:
    """What was asked, in words."""
    machine = question.hardware
    nodes = "" if question.nodes == 1 else f" on {question.nodes:,} nodes"
    links = machine.inside.name + (f", {machine.outside.name} between nodes" if question.nodes > 1 else "")
    batch = "" if question.batch == 1 else f"{question.batch} x "
    aside = f", {spoken_bytes(question.reserve_bytes)} of it set aside" if question.reserve_bytes else ""
    return (
        f"{batch}{question.tokens:,} tokens, {_pattern(question)}, over {_many(question.ranks, 'rank')}{nodes}: "
        f"{question.local_tokens:,} a rank.\n"
        f"{question.heads} query and {question.kv_heads} kv heads of {question.head_dim}, {question.dtype}, "
        f"{_many(question.layers, 'layer')}.\n"
        f"{machine.title}; {links}; {spoken_bytes(machine.memory_bytes)} for tensors{aside}."
    )


def _pattern(question: Question) -> str:
    pattern = question.pattern
    causal = "causal" if pattern.causal else "full"
    if isinstance(pattern, Dilated):
        return f"{causal}, dilated {','.join(f'{w}:{r}' for w, r in pattern.branches)}"
    if isinstance(pattern, Dense) and pattern.window is not None:
        return f"{causal}, window {(pattern.window[0] or 0) + 1:,}"
    return causal


def _tera(number: float) -> str:
    return f"{number / 1e12:,.0f}" if number >= 1e14 else f"{number / 1e12:.3g}"


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


def length(question: Question, furthest: Longest) -> str:
    """How long a sequence may be."""
    by = f"by {furthest.schedule}, {furthest.layout}"
    if not furthest.tokens:
        return f"Not even {furthest.granule:,} tokens fit {by}."
    return (
        f"The longest that fits {by}: {furthest.tokens:,} tokens, {furthest.tokens // question.ranks:,} a rank. "
        f"It holds {spoken_bytes(furthest.bytes_at)} of {spoken_bytes(question.memory_bytes)}; {furthest.granule:,} "
        "tokens more do not fit."
    )


def _small_print(found: Forecast) -> list[str]:
    asked = " and ".join(
        f"{rank} ({layout})" for layout, rank in {one.layout: one.asked for one in found.choices}.items()
    )
    exact = all(one.forward.traffic.is_exact for one in found.choices)
    counted = "to the byte" if exact else "some of its thousands of steps speaking for the others"
    told = [
        f"moved, held: by rank {asked}, {counted}; a step: the most of one. balance: the most work of a few ranks, "
        "over the mean of all. TFLOP/s of a rank, and efficiency (against one rank that could hold everything): "
        "forward and backward together.",
        "hides: forward/backward, whether less than 2 % of the time is waiting; from: tokens a rank from which on "
        "computing takes longer than moving.",
        *(f"Left out: {line}." for line in found.left_out),
        COUNTED,
        f"Rates of {found.question.hardware.name}: {found.question.hardware.sources['forward_flops']}.",
    ]
    if not all(one.is_played for one in found.choices):
        told.insert(
            0,
            "~ is the longer of computing and moving, or their sum where one cannot hide the other. What has no ~ was "
            "played, event by event, on a model of all ranks and links; --play-all plays every row.",
        )
    return told


# ---------------------------------------------------------------------------------------------------------- tables


def _name(found: Forecast, choice: Choice) -> str:
    mark = "[bold]" if choice is found.recommended else ""
    return f"{mark}{choice.schedule} {choice.layout}"


def _times(found: Forecast) -> Table:
    layers = found.question.layers
    step = "both" if layers == 1 else f"{layers} layers"
    numbers = ("forward", "backward", step, "TFLOP/s", "effi-\nciency", "balance", "holds", "fits")
    table = screen.table(
        "Time of a layer, how well it is spent, and what a rank holds of all layers", "", numbers=numbers
    )
    for one in found.choices:
        about = "" if one.is_played else "~"
        times = (one.forward.seconds, one.backward.seconds, one.step_seconds)
        table.add_row(
            _name(found, one),
            *(about + spoken_seconds(seconds) for seconds in times),
            _tera(one.flops_per_second),
            f"{one.efficiency:.0%}",
            f"{one.balance:.2f}",
            spoken_bytes(one.memory.peak_bytes),
            "yes" if one.fits else "no",
        )
    return table


def _moving(found: Forecast) -> Table:
    where = ("inside", "outside") if found.question.nodes > 1 else ("inside",)
    steps = (f"a step\n{place}" for place in where)
    numbers = ("moved\nforward", "moved\nbackward", "messages", *steps, "hides", "from")
    table = screen.table(
        "What a rank sends or receives for a layer, and whether computing hides it", "", numbers=numbers
    )
    for one in found.choices:
        passes = one.forward, one.backward
        carried = [each.traffic.busier for each in passes]
        table.add_row(
            _name(found, one),
            *(spoken_bytes(sum(some.bytes for some in each.values())) for each in carried),
            "/".join(f"{sum(some.messages for some in each.values())}" for each in carried),
            *(spoken_bytes(carried[0][place].most_bytes) for place in where),
            ("" if one.is_played else "~") + "/".join("yes" if each.is_hidden else "no" for each in passes),
            "/".join(_from(each) for each in passes),
        )
    return table


def _from(one: Pass) -> str:
    return "-" if one.hides_from is None else f"{one.hides_from:,}"


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


def _holding(found: Forecast, phase: str) -> Table:
    held = [one.memory.forward if phase == "forward" else one.memory.backward for one in found.choices]
    cells = [grouped(components) for components in held]
    groups = [group for group in cells[0] if any(each[group] for each in cells)]
    title = f"What a rank holds of a layer at its fullest moment, {phase}, in MiB"
    table = screen.table(title, "", numbers=(*groups, "all"))
    for one, each, components in zip(found.choices, cells, held, strict=True):
        table.add_row(_name(found, one), *(_mib(each[group]) for group in groups), _mib(sum(components.values())))
    return table


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f}" if nbytes >= 2**20 or not nbytes else f"{nbytes / 2**20:.2g}"


def _parts(best: Choice) -> Table:
    forward, backward, memory = best.memory.forward, best.memory.backward, best.memory
    table = screen.table(f"Part by part: {best.schedule} {best.layout}", "", numbers=("forward", "backward"))
    for component in dict.fromkeys((*forward, *backward)):
        if forward.get(component) or backward.get(component):
            table.add_row(component, *(spoken_bytes(some.get(component, 0)) for some in (forward, backward)))
    table.add_section()
    table.add_row("a layer at work", spoken_bytes(memory.forward_bytes), spoken_bytes(memory.backward_bytes))
    if memory.layers > 1:
        kept = spoken_bytes((memory.layers - 1) * memory.saved_bytes)
        table.add_row(f"kept by the {_many(memory.layers - 1, 'other')}", kept, kept)
    return table
