"""A key in a text of 2,048 bytes, found over two ranks by dense and dilated attention, and not by a window of 256.

python examples/retrieval/recipe.py                                # README.md says how long it takes
python examples/retrieval/recipe.py --share 0.01 --trials 1        # a hundredth of the steps, to see what it does

A model first learns the task in short texts, where steps are cheap. From its weights three models go on, to long ones:
each sees as its attention lets it. All commands are `longring train` and `longring eval`, and are printed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from longring.bench.records import commit

HERE = Path(__file__).parent
CONTEXT, WINDOW, DIGITS = 2048, 256, 5


class Stage(NamedTuple):
    """One `longring train`. Below CONTEXT the ranks hold sequences of their own; there they share every one."""

    context: int
    batch: int  # sequences of a step, over all ranks
    steps: int
    digits: int = DIGITS
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.context}" if self.digits == DIGITS else f"{self.context}-of-{self.digits}"


class Kind(NamedTuple):
    """How a model was made: from the weights behind so many of the short stages, in further ones of its own."""

    shares: int
    stages: tuple[Stage, ...]


def dilated(first: int, second: int) -> tuple[str, ...]:
    return ("--dilated", f"{first}:1,{second}:2")


LAST = ("--learning-rate", "0.001", "--final-rate", "0.02")
NARROW = ("--window", str(WINDOW))
SHORT = (Stage(128, 32, 1000, digits=18), Stage(128, 32, 300), Stage(256, 16, 400))
KINDS = {
    "dense": Kind(3, (Stage(512, 16, 500), Stage(CONTEXT, 4, 1400, more=LAST))),
    "dilated": Kind(  # rows of rate 2 see every other token only, of what is far; what stands between is learned here
        1,
        (
            Stage(128, 32, 1500, digits=18, more=dilated(32, 128)),
            Stage(128, 32, 300, more=dilated(32, 128)),
            Stage(256, 16, 500, more=dilated(64, 256)),
            Stage(
                512, 16, 700, more=dilated(WINDOW, 512)
            ),  # from here on a key may stand in the question's own segment
            Stage(CONTEXT, 4, 1200, more=(*dilated(WINDOW, CONTEXT), *LAST)),
        ),
    ),
    "window": Kind(  # most keys of long texts are out of its reach, and teach it nothing but to guess: small steps
        3,
        (
            Stage(512, 16, 300, more=NARROW),
            Stage(CONTEXT, 4, 200, more=(*NARROW, "--learning-rate", "0.0002")),
        ),
    ),
}
NAMES = {
    "dense": "dense",
    "dilated": f"dilated, {dilated(WINDOW, CONTEXT)[1]}",
    "window": f"window of {WINDOW}",
}
LAYERS = 3  # as recipe.toml says
REACH = LAYERS * (WINDOW - 1)  # of layers with the window, one behind the other
DEPTHS = (*(i / 16 for i in range(13)), 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 1)


def longring(*words: object) -> dict[str, Any]:
    """Run the command, and read what it tells in JSON."""
    command = ["longring", *map(str, words)]
    print("$", shlex.join(command), flush=True)
    done = subprocess.run([sys.executable, "-m", *command, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def trained(stages: tuple[Stage, ...], of: str, start: Path | None, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """What each stage did, all of it: one that was stopped goes on, and one that is done takes no time."""
    found, folder = [], start
    for stage in stages:
        words = ("--context", stage.context, "--digits", stage.digits, "--batch", stage.batch, "--ranks", asked.ranks)
        if stage.context < CONTEXT:
            words += ("--micro-batch", stage.batch // asked.ranks, "--context-ranks", 1)
        else:
            words += ("--micro-batch", stage.batch)
        steps = max(2, int(asked.share * stage.steps))
        words += ("--steps", steps, "--warmup", min(30, steps // 10), *stage.more)
        words += () if folder is None else ("--weights", folder)
        folder = asked.out / f"{of}-{stage.name}"
        begun, at_once = time.monotonic(), not folder.exists()
        longring("train", "--config", HERE / "recipe.toml", "--out", folder, *words)
        clock = time.monotonic() - begun if at_once else None  # of a stage that went on, part is not known
        found.append(what_it_did(folder) | {"clock_seconds": clock})
    return found


def what_it_did(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "step" in line]
    seconds, losses = sum(line["seconds"] for line in steps), [line["loss"] for line in steps]
    last = sum(losses[-20:]) / len(losses[-20:])
    print(f"  {len(steps):,} steps: loss {losses[0]:.3f} to {last:.3f} in {seconds:.0f} s", flush=True)
    return {"stage": folder.name, "steps": len(steps), "seconds": seconds, "first_loss": losses[0], "last_loss": last}


def judged(kind: str, asked: argparse.Namespace) -> dict[str, Any]:
    depths = ",".join(f"{depth:g}" for depth in DEPTHS)
    told = longring(
        *("eval", asked.out / f"{kind}-{CONTEXT}", "--passkey", "--depths", depths, "--trials", asked.trials),
        *("--ranks", asked.ranks, "--device", "cpu", "--out", asked.out / f"{kind}.json"),
    )
    shares = [f"{depth['share']:.0%}" for depth in told["depths"]]
    print(f"  found, from the beginning to the end: {' '.join(shares)}", flush=True)
    return told


def share(told: dict[str, Any], nearest: int, furthest: int = CONTEXT) -> float:
    """What was found of the keys that stand so many tokens back."""
    those = [depth for depth in told["depths"] if nearest <= depth["tokens_back"] <= furthest]
    return sum(depth["found"] for depth in those) / sum(depth["trials"] for depth in those)


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained", facecolor="white")
    axes = figure.subplots()
    looks = {"dense": ("#4477aa", "o"), "dilated": ("#228833", "s"), "window": ("#cc3311", "^")}
    for kind, told in results.items():
        back = [depth["tokens_back"] for depth in told["depths"]]
        found = [100 * depth["share"] for depth in told["depths"]]
        error = [100 * depth["error"] for depth in told["depths"]]
        color, marker = looks[kind]
        axes.errorbar(back, found, error, color=color, marker=marker, capsize=3, linewidth=1.8, label=NAMES[kind])
    for tokens, name in ((WINDOW, "the window"), (REACH, "three layers of it")):
        axes.axvline(tokens, color="#666666", linestyle="--", linewidth=1)
        axes.annotate(name, (tokens, 50), rotation=90, ha="right", va="center", color="#444444")
    axes.set(xlabel="how many tokens back the key stands", ylabel="keys found, %", ylim=(-4, 104))
    axes.set_title(f"Held-out keys of {DIGITS} digits in texts of {CONTEXT:,} bytes, by two ring ranks")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center right")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/retrieval"), help="where runs go")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trials", type=int, default=40, help="keys at each depth")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps of every stage, to try it out")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--record", type=Path, help="where the record goes: retrieval.json in --out, unless said")
    parser.add_argument("--picture", type=Path, help="and the picture: retrieval.png")
    asked = parser.parse_args()

    stages = {"short": trained(SHORT[: max(KINDS[kind].shares for kind in asked.kinds)], "short", None, asked)}
    results, seconds = {}, {}
    for kind in asked.kinds:
        shared, own = KINDS[kind]
        stages[kind] = trained(own, kind, asked.out / f"short-{SHORT[shared - 1].name}", asked)
        results[kind] = judged(kind, asked)
        # from nothing to the model that was judged
        seconds[kind] = sum(stage["seconds"] for stage in stages["short"][:shared] + stages[kind])

    print(f"\nof keys that no stage has seen, by {asked.ranks} ranks:")
    for kind, told in results.items():
        near = f"{share(told, 0, WINDOW):6.1%} of those up to {WINDOW} tokens back"
        far = f"{share(told, WINDOW + 1):6.1%} of those further, {share(told, REACH + 2):6.1%} beyond {REACH}"
        print(f"  {kind:8} found {near}, {far}; trained for {seconds[kind] / 60:.1f} minutes")
    record = {"commit": commit(), "training_seconds": seconds, "stages": stages, "results": results}
    path, picture = asked.record or asked.out / "retrieval.json", asked.picture or asked.out / "retrieval.png"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(results, picture)
    print(f"record: {path}; picture: {picture}")


if __name__ == "__main__":
    main()
