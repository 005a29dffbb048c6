"""`longring plan`: what a sequence will cost on so many ranks, before anybody rents them. Loads no torch."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from ..plan.quantities import spoken_bytes
from . import options, screen

if TYPE_CHECKING:
    from ..plan.forecast import Choice, Forecast, Pass, Question
    from ..plan.hardware import Hardware

MOST_RANKS = 1 << 16  # which take a quarter of a minute
REAL = "nothing: no tensor was made and no rank was started"
SIMULATED = (
    "everything: bytes and FLOPs are counted on the plans that the engine runs, memory by walking them, times by "
    "attained rates of the hardware and by playing the plan of the leading choices on a model of its links; of windows "
    "and documents on a GPU memory and times are rough, since the engine takes them in fewer launches"
)


def plan(
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            parser=options.a_count("--tokens"),
            metavar="COUNT",
            help="Length of the sequence: 4096, 64K, 1M, 1Mi, 1e6.",
            show_default="1M",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            parser=options.a_count("--ranks", most=MOST_RANKS),
            metavar="COUNT",
            help="Processes that share it, a GPU each.",
            show_default="8",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            parser=options.a_count("--nodes"),
            metavar="COUNT",
            help="Machines the ranks are spread over evenly.",
            show_default="as many as the hardware needs",
        ),
    ] = None,
    batch: options.Batch = 1,
    heads: options.Heads = 32,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = 128,
    layers: Annotated[
        int,
        typer.Option(
            "--layers", parser=options.a_count("--layers"), metavar="COUNT", help="Layers of attention in the model."
        ),
    ] = 1,
    dtype: options.Dtype = "bf16",
    causal: options.Causal = True,
    window: options.Window = None,
    dilated: options.Branches = None,
    layout: Annotated[
        str,
        typer.Option(
            "--layout",
            metavar="NAME",
            help="How tokens are dealt to ranks: a name, all, or auto, which is what suits the pattern.",
        ),
    ] = "auto",
    schedule: Annotated[
        str, typer.Option("--schedule", metavar="NAME", help="Look at one schedule alone; auto looks at every one.")
    ] = "auto",
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware", metavar="NAME", help="What a rank runs on; `list` shows what there is.", show_default="h200"
        ),
    ] = None,
    hardware_file: Annotated[
        Path | None,
        typer.Option("--hardware-file", metavar="FILE", help="TOML with hardware of your own.", show_default="none"),
    ] = None,
    inside: Annotated[
        str | None,
        typer.Option("--inside", metavar="LINK", help="What joins the ranks of a node.", show_default="the hardware's"),
    ] = None,
    outside: Annotated[
        str | None,
        typer.Option("--outside", metavar="LINK", help="What joins nodes: hdr, ndr.", show_default="the hardware's"),
    ] = None,
    reserve: Annotated[
        int,
        typer.Option(
            "--reserve",
            parser=options.a_size("--reserve"),
            metavar="SIZE",
            help="Memory of a rank to set aside for weights, optimizer and all that is not attention: 40GiB.",
            show_default="0",
        ),
    ] = 0,
    max_tokens: Annotated[
        bool, typer.Option("--max-tokens", help="How long can I go? The longest sequence that fits, by schedule.")
    ] = False,
    fit: Annotated[
        bool, typer.Option("--fit", help="How many GPUs do I need? The fewest ranks whose memory holds --tokens.")
    ] = False,
    play_all: Annotated[
        bool, typer.Option("--play-all", help="Time every row by the event simulation, not the leading ones alone.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """What will it cost? Memory, traffic and time of attention over many ranks, predicted; nothing is run.

    For every schedule and layout: the bytes a rank holds, part by part; what it computes and sends; whether
    sending hides behind computing, and from how many tokens a rank on; the time of a layer and of a training
    step; and which one to take, with the reason. Bytes sent are those that the engine will send, counted on
    its own plans. Times are as good as the rates in the hardware's data, and rough for windows on a GPU: see
    docs/plan.md for how far to trust them.

    \b
    One million tokens on 64 GPUs:
      longring plan --tokens 1M --ranks 64 --nodes 8 --heads 32 --kv-heads 8 --layers 32 --hardware h200
    LongNet's dilated attention:
      longring plan --tokens 1Mi --ranks 64 --dilated 2048:1,4096:2,8192:4,16384:8,32768:16
    How long can I go, and how many GPUs do I need, with 40 GiB taken by the model?
      longring plan --max-tokens --ranks 8 --layers 32 --kv-heads 8 --reserve 40GiB
      longring plan --fit --tokens 10M --layers 32 --kv-heads 8 --reserve 40GiB
    """
    hardware = _usual(hardware_file) if hardware is None else hardware
    arguments = {name: value for name, value in locals().items() if name != "as_json"}
    with _uncollected():
        if hardware == "list":
            _list_hardware(hardware_file, as_json, arguments)
        else:
            answer = _answer_how_many if fit else _answer_how_long if max_tokens else _answer
            answer(_question(arguments), arguments, as_json)


def _usual(hardware_file: Path | None) -> str:
    """What is meant where nobody said; with a file of one's own it would hardly be this."""
    if hardware_file is not None:
        from ..plan.hardware import all_hardware

        known = ", ".join(all_hardware(hardware_file))
        raise ArgumentError(f"--hardware-file {hardware_file}: say with --hardware which machine is meant, of {known}")
    return "h200"


@contextmanager
def _uncollected() -> Iterator[None]:
    """Looking for garbage would take a sixth of a command that is over before there is any."""
    gc.disable()
    atexit.register(gc.freeze)  # nor is it looked for when the process ends, which gives back everything at once
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # what was made meanwhile counts as old now, and is not gone through just because it is new
        gc.enable()


# ------------------------------------------------------------------------------------------------ the question


def _question(told: dict[str, Any]) -> Question:
    from ..plan import hardware as known
    from ..plan.forecast import Question

    if told["max_tokens"] and told["fit"]:
        raise ArgumentError("--max-tokens asks for the length and --fit for the ranks; take one of them")
    if told["max_tokens"] and told["tokens"] is not None:
        raise ArgumentError("--max-tokens answers how long; leave out --tokens")
    if told["fit"] and (told["ranks"] is not None or told["nodes"] is not None):
        raise ArgumentError("--fit answers how many; leave out --ranks and --nodes")
    options.bytes_of(told["dtype"])
    machine = known.hardware(told["hardware"], told["hardware_file"])
    for place in ("inside", "outside"):
        if told[place] is not None:
            machine = replace(machine, **{place: known.link(told[place], told["hardware_file"])})
    ranks = told["ranks"] or 8
    return Question(
        pattern=options.pattern_of(causal=told["causal"], window=told["window"], dilated=told["dilated"]),
        tokens=told["tokens"] or 10**6,
        ranks=ranks,
        nodes=_nodes(ranks, told["nodes"], machine),
        batch=told["batch"],
        heads=told["heads"],
        kv_heads=options.kv_heads_of(told["heads"], told["kv_heads"]),
        head_dim=told["head_dim"],
        dtype=told["dtype"],
        hardware=machine,
        layers=told["layers"],
        reserve_bytes=told["reserve"],
    )


def _nodes(ranks: int, nodes: int | None, machine: Hardware) -> int:
    if nodes is not None:
        if ranks % nodes:
            raise ArgumentError(f"--ranks must be a multiple of --nodes, got {ranks} and {nodes}")
        return nodes
    needed = -(-ranks // machine.ranks_per_node)
    if ranks % needed:
        raise ArgumentError(
            f"--ranks {ranks} do not spread evenly over {needed} nodes of up to {machine.ranks_per_node} "
            f"({machine.name}); say --nodes, or another number of ranks"
        )
    return needed


# -------------------------------------------------------------------------------------------------- the answers


def _answer(question: Question, told: dict[str, Any], as_json: bool) -> None:
    from ..plan.forecast import forecast, is_counted_quickly, longest

    found = forecast(question, schedule=told["schedule"], layout=told["layout"], plays_all=told["play_all"])
    best = found.recommended
    by = best.schedule if told["schedule"] != "auto" or is_counted_quickly(question, best.schedule) else "exchange"
    furthest = longest(question, by, best.layout, is_rough=True)
    if as_json:
        screen.print_json(_as_json(told, found) | {"longest_tokens": furthest.tokens, "longest": asdict(furthest)})
        return
    from . import plan_page as page

    page.print_forecast(found, ends_with=page.length(question, furthest))


def _answer_how_long(question: Question, told: dict[str, Any], as_json: bool) -> None:
    from ..plan.forecast import candidates, forecast, is_counted_quickly, longest

    pairs, left_out = candidates(question, schedule=told["schedule"], layout=told["layout"])
    if told["schedule"] == "auto":
        slow = sorted({name for name, _ in pairs if not is_counted_quickly(question, name)})
        pairs = [pair for pair in pairs if pair[0] not in slow]
        left_out += tuple(f"{name}: its dilated rows are counted one by one; ask for it by name" for name in slow)
    found = sorted((longest(question, *pair) for pair in pairs), key=lambda one: -one.tokens)
    best = found[0]
    if not best.tokens:
        raise ArgumentError(
            f"not even {best.granule:,} tokens fit {question.ranks:,} ranks of {question.hardware.name}: a rank would "
            f"hold {spoken_bytes(best.bytes_beyond)} of {spoken_bytes(question.memory_bytes)}"
        )
    at_best = forecast(replace(question, tokens=best.tokens), schedule=best.schedule, layout=best.layout)
    if as_json:
        body = {"longest_tokens": best.tokens, "longest": [asdict(one) for one in found], "left_out": left_out}
        screen.print_json(_as_json(told, at_best) | body)
        return
    from . import plan_page as page

    page.print_lengths(question, found, at_best.recommended, left_out)


def _answer_how_many(question: Question, told: dict[str, Any], as_json: bool) -> None:
    from ..plan.forecast import fewest, forecast

    enough = fewest(question, schedule=told["schedule"], layout=told["layout"])
    found = forecast(enough.question, schedule=told["schedule"], layout=told["layout"], plays_all=told["play_all"])
    if as_json:
        body = {"fewest_ranks": enough.question.ranks, "fewest_nodes": enough.question.nodes}
        fewer = {"fewer_ranks": enough.fewer, "bytes_with_fewer": enough.bytes_fewer}
        screen.print_json(_as_json(told, found) | body | fewer)
        return
    from . import plan_page as page

    page.print_forecast(found, begins_with=page.number(enough))


# --------------------------------------------------------------------------------------------------------- JSON


def _as_json(told: dict[str, Any], found: Forecast) -> dict[str, Any]:
    best = found.recommended
    return screen.envelope("plan", told, real=REAL, simulated=SIMULATED) | {
        "hardware": _hardware_as_json(found.question.hardware),
        "local_tokens": found.question.local_tokens,
        "memory_bytes": found.question.memory_bytes,
        "choices": [_choice_as_json(one) for one in found.choices],
        "recommended": {"schedule": best.schedule, "layout": best.layout, "fits": best.fits, "reason": found.reason},
        "auto": None if found.auto is None else asdict(found.auto),
        "left_out": list(found.left_out),
    }


def _choice_as_json(one: Choice) -> dict[str, Any]:
    return {
        "schedule": one.schedule,
        "layout": one.layout,
        "ranks": one.question.ranks,
        "nodes": one.question.nodes,
        "tokens": one.question.tokens,
        "asked_rank": one.asked,
        "forward": _pass_as_json(one.forward, one.memory.forward),
        "backward": _pass_as_json(one.backward, one.memory.backward),
        "seconds": one.seconds,
        "step_seconds": one.step_seconds,
        "is_played": one.is_played,
        "tflops": one.flops_per_second / 1e12,
        "memory": {
            "rank": one.memory.rank,
            "components": one.memory.backward
            if one.memory.backward_bytes >= one.memory.forward_bytes
            else one.memory.forward,
            "saved_bytes_of_a_layer": one.memory.saved_bytes,
            "layers": one.memory.layers,
            "peak_bytes": one.memory.peak_bytes,
        },
        "traffic": {
            phase: {
                way: {where: carried._asdict() for where, carried in getattr(each.traffic, way).items()}
                for way in ("sent", "received")
            }
            for phase, each in (("forward", one.forward), ("backward", one.backward))
        },
        "balance": one.balance,
        "efficiency": one.efficiency,
        "fits": one.fits,
    }


def _pass_as_json(one: Pass, components: dict[str, int]) -> dict[str, Any]:
    return {
        "seconds": one.seconds,
        "computing_seconds": one.computing,
        "moving_seconds": one.moving,
        "unhidden_seconds": one.unhidden,
        "is_played": one.is_played,
        "hidden": one.hidden,
        "is_hidden": one.is_hidden,
        "hides_from_local_tokens": one.hides_from,
        "flops": one.flops,
        "tflops": one.flops_per_second / 1e12,
        "bytes_sent": one.traffic.bytes_sent,
        "messages_sent": one.traffic.messages_sent,
        "components": components,
        "peak_bytes": sum(components.values()),
    }


# ------------------------------------------------------------------------------------------------------ hardware


def _list_hardware(file: Path | None, as_json: bool, told: dict[str, Any]) -> None:
    from ..plan.hardware import all_hardware
    from . import plan_page as page

    known = all_hardware(file)
    if as_json:
        body = {"hardware": {name: _hardware_as_json(one) for name, one in known.items()}}
        screen.print_json(screen.envelope("plan", told, real=REAL, simulated=SIMULATED) | body)
    else:
        page.print_hardware(known)


def _hardware_as_json(one: Hardware) -> dict[str, Any]:
    return asdict(one)
