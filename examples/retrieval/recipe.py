"""A key in a text of 2,048 bytes, found over two ranks by dense and by dilated attention, and not by a window of 256.

python examples/retrieval/recipe.py                                # README.md says how long it takes
python examples/retrieval/recipe.py --share 0.01 --trials 1        # a hundredth of the steps, to see what it does

A model first learns the task in short texts, where steps are cheap. From its weights three models go on in long ones:
each sees as its attention lets it. All commands are `longring train` and `longring eval`, and are printed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONTEXT, WINDOW = 2048, 256
SHORT = (  # (context, sequences of a step, steps): the ranks hold sequences of their own
    (128, 32, 1500),
    (256, 16, 1000),
    (512, 16, 600),
)
LONG = (  # (digits of a key, sequences of a step, steps): the ranks are a ring, and share every sequence
    (18, 4, 400),
    (5, 8, 300),
)
KINDS = {
    "dense": (),
    "dilated": ("--dilated", f"{WINDOW}:1,{CONTEXT // 2}:2,{CONTEXT}:4"),
    "window": ("--window", str(WINDOW)),
}
DEPTHS = [i / 8 for i in range(9)]


def longring(*words: object) -> dict[str, Any]:
    """Run the command, and read what it tells in JSON."""
    command = ["longring", *map(str, words)]
    print("$", shlex.join(command), flush=True)
    done = subprocess.run([sys.executable, "-m", *command, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def trained(out: Path, *words: object) -> dict[str, Any]:
    """What the stage did, all of it: one that was stopped goes on, and one that is done takes no time."""
    longring("train", "--config", HERE / "recipe.toml", "--out", out, *words)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "step" in line]
    seconds, losses = sum(line["seconds"] for line in steps), [line["loss"] for line in steps]
    last = sum(losses[-20:]) / len(losses[-20:])
    print(f"  {len(steps):,} steps: loss {losses[0]:.3f} to {last:.3f} in {seconds:.0f} s", flush=True)
    return {"stage": out.name, "steps": len(steps), "seconds": seconds, "first_loss": losses[0], "last_loss": last}


def learn_in_short_texts(out: Path, ranks: int, share: float) -> tuple[Path, list[dict[str, Any]]]:
    """The folder whose weights know the task, and what each stage did."""
    folder, stages = None, []
    for context, batch, steps in SHORT:
        words = ("--context", context, "--batch", batch, "--micro-batch", batch // ranks, "--context-ranks", 1)
        words += ("--ranks", ranks, *lasting(share * steps), *from_weights_of(folder))
        folder = out / f"short-{context}"
        stages.append(trained(folder, *words))
    return folder, stages


def go_on_in_long_texts(kind: str, out: Path, folder: Path, ranks: int, share: float) -> list[dict[str, Any]]:
    """The last of the folders is out / kind-5."""
    stages = []
    for digits, batch, steps in LONG:
        words = ("--context", CONTEXT, "--batch", batch, "--micro-batch", batch, "--digits", digits, *KINDS[kind])
        words += ("--ranks", ranks, *lasting(share * steps), *from_weights_of(folder))
        folder = out / f"{kind}-{digits}"
        stages.append(trained(folder, *words))
    return stages


def lasting(steps: float) -> tuple[object, ...]:
    return ("--steps", max(2, int(steps)), "--warmup", min(30, int(steps) // 10))


def from_weights_of(folder: Path | None) -> tuple[object, ...]:
    return () if folder is None else ("--weights", folder)


def judged(kind: str, out: Path, ranks: int, trials: int) -> dict[str, Any]:
    depths = ",".join(f"{depth:g}" for depth in DEPTHS)
    told = longring(
        *("eval", out / f"{kind}-{LONG[-1][0]}", "--passkey", "--depths", depths, "--trials", trials, "--ranks", ranks),
        *("--device", "cpu", "--out", out / f"{kind}.json"),
    )
    shares = [f"{depth['share']:.0%}" for depth in told["depths"]]
    print(f"  found, from the beginning to the end: {' '.join(shares)}", flush=True)
    return told


def beyond(told: dict[str, Any], tokens: int) -> float:
    """The share that is found of keys further back than that."""
    far = [depth for depth in told["depths"] if depth["tokens_back"] > tokens]
    return sum(depth["found"] for depth in far) / sum(depth["trials"] for depth in far)


def seconds_of(kind: str, stages: list[dict[str, Any]]) -> float:
    """From nothing to the model that was judged, the stages that all have in common included."""
    return sum(stage["seconds"] for stage in stages if stage["stage"].partition("-")[0] in ("short", kind))


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained", facecolor="white")
    axes = figure.subplots()
    looks = {"dense": ("#4477aa", "o"), "dilated": ("#228833", "s"), "window": ("#cc3311", "^")}
    for kind, told in results.items():
        back = [depth["tokens_back"] for depth in told["depths"]]
        share = [100 * depth["share"] for depth in told["depths"]]
        error = [100 * depth["error"] for depth in told["depths"]]
        name = {"dense": "dense", "dilated": f"dilated, {KINDS['dilated'][1]}", "window": f"window of {WINDOW}"}[kind]
        color, marker = looks[kind]
        axes.errorbar(back, share, error, color=color, marker=marker, capsize=3, linewidth=1.8, label=name)
    axes.axvline(WINDOW, color="#666666", linestyle="--", linewidth=1)
    axes.annotate(f"{WINDOW} tokens", (WINDOW, 50), rotation=90, ha="right", va="center", color="#444444")
    axes.set(xlabel="how many tokens back the key stands", ylabel="keys found, %", ylim=(-4, 104))
    axes.set_title(f"Held-out keys of 5 digits in texts of {CONTEXT:,} bytes, by two ring ranks")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center right")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/retrieval"), help="where runs go")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trials", type=int, default=25, help="keys at each depth")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps of every stage, to try it out")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--record", type=Path, help="where the record goes: retrieval.json in --out, unless said")
    parser.add_argument("--picture", type=Path, help="and the picture: retrieval.png")
    asked = parser.parse_args()

    short, stages = learn_in_short_texts(asked.out, asked.ranks, asked.share)
    for kind in asked.kinds:
        stages += go_on_in_long_texts(kind, asked.out, short, asked.ranks, asked.share)
    results = {kind: judged(kind, asked.out, asked.ranks, asked.trials) for kind in asked.kinds}
    seconds = {kind: seconds_of(kind, stages) for kind in asked.kinds}

    print(f"\nof keys that no stage has seen, by {asked.ranks} ranks:")
    for kind, told in results.items():
        far = f"{beyond(told, WINDOW):7.1%} of those more than {WINDOW} tokens back"
        print(f"  {kind:8} found {beyond(told, 0):7.1%}, {far}; trained for {seconds[kind] / 60:.1f} minutes")
    record = {"training_seconds": seconds, "stages": stages, "results": results}
    path, picture = asked.record or asked.out / "retrieval.json", asked.picture or asked.out / "retrieval.png"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(results, picture)
    print(f"record: {path}; picture: {picture}")


if __name__ == "__main__":
    main()
