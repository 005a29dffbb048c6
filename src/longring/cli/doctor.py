"""`longring doctor`: what this machine has for longring, what stands in the way, and whether two ranks get it right."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from ..plan.quantities import spoken_bytes
from . import options, screen

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.doctor import Diagnosis
    from ..bench.doctor.kernels import Kernels, Taken
    from ..bench.doctor.network import Interface, Network
    from ..plan.environment import Concern
    from ..testing.self_test import Judged, Outcome

LEVELS = {"wrong": "bold red", "slow": "yellow", "note": "cyan"}
MEANINGS = {"wrong": "it will fail or hang", "slow": "it works, and could be faster", "note": "good to know"}
PATIENCE = {"cpu": 30.0, "cuda": 120.0}  # seconds
NAMES = 18  # columns
Lines = Iterable[tuple[str, str]]


def doctor(
    nodes: Annotated[
        int,
        typer.Option(
            parser=options.a_count("--nodes"),
            metavar="COUNT",
            help="Machines the ranks will be on: with several, more of the network matters.",
        ),
    ] = 1,
    ranks: Annotated[
        int | None,
        typer.Option(
            parser=options.a_count("--ranks"),
            metavar="COUNT",
            help="Ranks that will share this machine.",
            show_default="one for each GPU, or one",
        ),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test/--no-self-test", help="Whether two ranks compute something and are judged.")
    ] = True,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="After which a self-test has failed.",
            show_default=f"{PATIENCE['cpu']:g}; on GPUs {PATIENCE['cuda']:g}, since some kernels are compiled first",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """What this machine has, and whether all is well.

    Says which kernels and transports would be taken on this machine and why others refuse, what in the environment
    slows NCCL or Gloo down or breaks them, and what to do about it. Then two processes compute ring and dilated
    attention, forward and backward, and are judged by the float64 definition; on the GPUs too where there are any.
    Nothing is changed, and nothing leaves this machine.

    \b
        longring doctor
        longring doctor --nodes 4 --ranks 8    # one of four machines

    Exit code 1 if the self-test fails, or if something is set that will fail or hang.
    """
    _check(self_test)

    from ..bench.doctor import diagnose

    console = screen.console()
    with screen.progress(console, quiet=as_json) as progress:
        bar = progress.add_task("looking around", total=None)
        found = diagnose(nodes=nodes, ranks_here=ranks)
        progress.update(bar, description="two ranks at work")
        outcomes = _self_tests(found, timeout) if self_test else []
    if as_json:
        given = {"nodes": nodes, "ranks": ranks, "self_test": self_test, "timeout": timeout}
        screen.print_json(_as_json(given, found, outcomes))
    else:
        _print_page(console, found, outcomes)
    if not _is_well(found, outcomes):
        raise typer.Exit(1)


def _check(self_test: bool) -> None:
    if self_test and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ArgumentError(
            "longring doctor starts the ranks of its self-test by itself: run it without torchrun, or with "
            "--no-self-test"
        )


def _self_tests(found: Diagnosis, timeout: float | None) -> list[Outcome]:
    from ..testing.self_test import self_test

    devices = ["cpu", "cuda"] if found.gpus else ["cpu"]
    return [self_test(device, timeout=timeout or PATIENCE[device]) for device in devices]


# ------------------------------------------------------------------------------------------------ judgement


def _is_well(found: Diagnosis, outcomes: list[Outcome]) -> bool:
    return all(outcome.ok for outcome in outcomes) and not _of_level("wrong", found)


def _of_level(level: str, found: Diagnosis) -> list[Concern]:
    return [concern for concern in found.concerns if concern.level == level]


def _verdict(found: Diagnosis, outcomes: list[Outcome]) -> str:
    failed = [outcome for outcome in outcomes if not outcome.ok]
    wrong = len(_of_level("wrong", found))
    faults = [
        *([f"the self-test failed on {' and '.join(outcome.device for outcome in failed)}"] if failed else []),
        *([f"{wrong} setting{'s' if wrong > 1 else ''} will fail or hang, see above"] if wrong else []),
    ]
    if faults:
        return f"NOT well: {', and '.join(faults)}."
    tested = "" if outcomes else " No self-test was run."
    return f"All is well.{tested}" if not found.concerns else f"All is well; see above what could be better.{tested}"


# ------------------------------------------------------------------------------------------------ the page


def _print_page(console: Console, found: Diagnosis, outcomes: list[Outcome]) -> None:
    from .. import __version__

    software = found.software
    console.print(f"longring {__version__} on {software.system}, Python {software.python}\n", soft_wrap=True)
    _print_section(console, "Software", _software_lines(found))
    _print_section(console, "Devices", _device_lines(found))
    for kernels in found.kernels:
        _print_section(console, f"Kernels on {kernels.device}", _kernel_lines(kernels))
    _print_section(console, "Between ranks", _transport_lines(found))
    _print_section(console, "Network", _network_lines(found.network))
    set_here = [(name, value) for name, value in found.environment.items()]
    _print_section(console, "Environment", set_here or [("", "no variable is set that matters")])
    if found.links is not None and found.links.topology is not None:
        console.print("Topology", style="bold")
        console.print(found.links.topology, soft_wrap=True)
    for outcome in outcomes:
        title = f"Self-test: 2 ranks on {outcome.device}, forward and backward, {outcome.seconds:.1f} s"
        _print_section(console, title, _outcome_lines(outcome))
    for level, meaning in MEANINGS.items():
        if concerns := _of_level(level, found):
            title = f"{level.capitalize()}: {meaning}"
            _print_section(console, title, [(c.name, c.text) for c in concerns], style=LEVELS[level])
    style = "bold green" if _is_well(found, outcomes) else "bold red"
    console.print(_verdict(found, outcomes), style=style, soft_wrap=True)


def _print_section(console: Console, title: str, lines: Lines, style: str = "bold") -> None:
    """Names to the left, words beside them that keep to their column."""
    from textwrap import fill

    console.print(title, style=style)
    for name, words in lines:
        first = f"  {name:<{NAMES}}"
        wrapped = fill(words, console.width, initial_indent=first, subsequent_indent=" " * len(f"  {'':<{NAMES}}"))
        console.print(wrapped, soft_wrap=True)
    console.print()


def _software_lines(found: Diagnosis) -> Lines:
    packages = found.software.packages
    yield "installed", ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    missing = [name for name, version in packages.items() if version is None]
    if missing:
        yield "not installed", ", ".join(missing)
    cuda = {name: version for name, version in found.software.cuda.items() if version}
    yield "CUDA", ", ".join(f"{name} {version}" for name, version in cuda.items()) or "none"


def _device_lines(found: Diagnosis) -> Lines:
    cpu = found.cpu
    cores = f"{cpu.cores} of {cpu.cores_of_machine} cores" if cpu.cores < cpu.cores_of_machine else f"{cpu.cores} cores"
    threads = f"{cpu.threads} thread{'s' if cpu.threads > 1 else ''} in a process"
    memory = [] if cpu.memory_bytes is None else [f"{spoken_bytes(cpu.memory_bytes)} of memory"]
    if cpu.free_bytes is not None:
        memory.append(f"{spoken_bytes(cpu.free_bytes)} of it free")
    yield "CPU", ", ".join([cpu.name, cores, threads, cpu.instructions, *memory])
    for gpu in found.gpus:
        capability = f"compute capability {gpu.capability[0]}.{gpu.capability[1]} ({gpu.generation})"
        memory = [f"{spoken_bytes(gpu.memory_bytes)} of memory", f"{spoken_bytes(gpu.free_bytes)} of it free"]
        yield f"GPU {gpu.index}", ", ".join([gpu.name, capability, f"{gpu.processors} multiprocessors", *memory])
    if not found.gpus:
        yield "GPU", f"none: {found.no_gpu}"
    yield "GPU to GPU", _links(found)


def _links(found: Diagnosis) -> str:
    if found.links is None:
        return "no two GPUs, so no P2P and no NVLink between them"
    apart = found.links.apart
    reach = "all reach each other's memory" if not apart else f"{len(apart)} pairs go through the host"
    drawn = "nvidia-smi draws the topology below" if found.links.topology else "nvidia-smi, which would tell, is absent"
    return f"{reach}; {drawn}"


def _kernel_lines(kernels: Kernels) -> Lines:
    if kernels.only is not None:
        dtypes = ", ".join(dict.fromkeys(taken.dtype for taken in kernels.taken))
        dims = [taken.head_dim for taken in kernels.taken]
        shapes = f"{dtypes}, head dimensions {min(dims)} to {max(dims)}; dense, window and dilated"
        yield kernels.only, f"computes all usual shapes, forward and backward ({shapes})"
    else:
        for taken in kernels.taken:
            yield _shape(taken), "; ".join(f"{pattern}: {_both_passes(taken, pattern)}" for pattern in taken.forward)
        same_bits = {taken.deterministic: _shape(taken) for taken in reversed(kernels.taken)}
        said = ", ".join(f"{name} ({shape})" for name, shape in reversed(same_bits.items()))
        yield "deterministic", f"with deterministic=True: {said}"
    for reason, names in kernels.refusals.items():
        yield "refused", f"{', '.join(names)}: {reason}{_of_shapes(names, kernels)}"


def _shape(taken: Taken) -> str:
    return f"{taken.dtype}, d {taken.head_dim}"


def _both_passes(taken: Taken, pattern: str) -> str:
    """The operation with most of the work, forward and backward."""
    forward, backward = (next(iter(shares[pattern])) for shares in (taken.forward, taken.backward))
    return forward if forward == backward else f"{forward}, backward {backward}"


def _of_shapes(names: dict[str, list[Taken]], kernels: Kernels) -> str:
    shapes = dict.fromkeys(_shape(taken) for shapes in names.values() for taken in shapes)
    return "" if len(shapes) == len(kernels.taken) else f" [{'; '.join(shapes)}]"


def _transport_lines(found: Diagnosis) -> Lines:
    for way in found.transports:
        yield way.name, f"{way.carries}: {way.taken or 'not here, ' + str(way.refusal)}"


def _network_lines(network: Network) -> Lines:
    yield "this machine", f"{network.host}, whose name leads {_leads(network)}"
    for interface in network.interfaces:
        if interface.is_up is not False:
            yield interface.name, _interface(interface)
    down = [interface.name for interface in network.interfaces if interface.is_up is False]
    if down:
        yield "down", ", ".join(down)
    adapters = [f"{each.name} port {each.port}: {each.state}, {each.rate}" for each in network.adapters]
    yield "InfiniBand", "; ".join(adapters) or "no adapter"


def _leads(network: Network) -> str:
    return "nowhere" if network.host_address is None else f"to {network.host_address}"


def _interface(interface: Interface) -> str:
    speed = "" if interface.megabits is None else f", {interface.megabits / 1000:g} Gbit/s"
    return f"{interface.address or 'no IPv4 address'}{speed}"


def _outcome_lines(outcome: Outcome) -> Lines:
    if outcome.failure is not None:
        yield "FAILED", outcome.failure
    for judged in outcome.judged:
        yield "right" if judged.ok else "WRONG", f"{judged.question}: {_of_judged(judged)}"


def _of_judged(judged: Judged) -> str:
    how = f"{judged.dtype}, {judged.layout}, {judged.schedule}, {judged.kernel}"
    if judged.ok:
        return f"{judged.budget_used:.0%} of the error budget ({how})"
    wrong = (f"{v.quantity} {v.error:.1e}, allowed {v.allowed:.1e}" for v in judged.verdicts if not v.ok)
    return f"relative error of {'; '.join(wrong)} ({how})"


def _as_json(arguments: dict[str, Any], found: Diagnosis, outcomes: list[Outcome]) -> dict[str, Any]:
    tested = [f"2 processes with {outcome.device} tensors computed forward and backward" for outcome in outcomes]
    looked = "this machine was looked at"
    return {
        **screen.envelope("doctor", arguments, real="; ".join([looked, *tested]), simulated="nothing"),
        "found": found.as_json(),
        "self_tests": [_outcome_as_json(outcome) for outcome in outcomes],
        "ok": _is_well(found, outcomes),
        "verdict": _verdict(found, outcomes),
    }


def _outcome_as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "device": outcome.device,
        "seconds": outcome.seconds,
        "failure": outcome.failure,
        "ok": outcome.ok,
        "questions": [
            {
                "question": judged.question,
                "layout": judged.layout,
                "dtype": judged.dtype,
                "schedule": judged.schedule,
                "kernel": judged.kernel,
                "errors": {verdict.quantity: verdict.error for verdict in judged.verdicts},
                "allowed": {verdict.quantity: verdict.allowed for verdict in judged.verdicts},
                "ok": judged.ok,
            }
            for judged in outcome.judged
        ],
    }
