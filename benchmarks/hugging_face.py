"""Longring against sdpa on every architecture of the installed Transformers that builds from a tiny config.

OMP_NUM_THREADS=1 python benchmarks/hugging_face.py                     # all: the record, and the page made of it
python benchmarks/hugging_face.py causal-lm/llama masked-lm/bert        # some: their rows as JSON
python benchmarks/hugging_face.py --again causal-lm/llama               # some, whose rows in the record are replaced
python benchmarks/hugging_face.py --again --minutes 20                  # those that were not run, for so long
python benchmarks/hugging_face.py --page                                # the page, from the record

Each model has the same random weights for both, in float64 throughout. In one process all outputs, the loss and the
gradients of all parameters are compared, plain and with padding; and, where these are equal, over two virtual ranks
within `sharded`. Attention that goes by other means than longring is seen by watching for torch's own.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "docs/records/hugging_face.json", ROOT / "docs/transformers_models.md"
LIMIT = 300.0  # seconds that an architecture may take
MAPPINGS = {  # of AutoModel
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "ctc": "MODEL_FOR_CTC_MAPPING",
    "text-to-waveform": "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING",
    "base": "MODEL_MAPPING",  # of those that are in none of the others: images, sound, encoders
}
NOT_RUN = {"one": "not run", "said": "", "ranks": None, "ranks_said": "", "model": None}

# -------------------------------------------------------------------------------------------------- one architecture


def worker() -> None:
    """Read names of architectures, write a line of JSON for each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity(50)
    from longring.integrations.transformers import register

    register()
    for line in sys.stdin:
        began = time.perf_counter()
        row = examined(line.strip())
        row["seconds"] = round(time.perf_counter() - began, 1)
        answers.write(json.dumps(row) + "\n")
        answers.flush()
        gc.collect()


def examined(name: str) -> dict[str, Any]:
    import transformers.models.auto.modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import longring as lr

    mapping, _, kind = name.partition("/")
    row: dict[str, Any] = {"name": name, "model": None, "one": "not built", "said": "", "ranks": None, "ranks_said": ""}
    names = getattr(auto, MAPPINGS[mapping] + "_NAMES")
    row["model"] = names[kind] if isinstance(names[kind], str) else names[kind][0]
    try:
        found = getattr(auto, MAPPINGS[mapping])[CONFIG_MAPPING[kind]]
        made = found if isinstance(found, type) else found[0]
        config = made.config_class or CONFIG_MAPPING[kind]
        row["model"] = made.__name__
        reference = Reference.of(config, made)
    except Exception as error:
        row["said"] = spoken(error)
        return row
    row["parameters"] = sum(x.numel() for x in reference.model.parameters())
    row["against"] = reference.by
    try:
        compared(row, reference)
    except lr.errors.LongringError as error:
        row["one"], row["said"] = "refused", spoken(error)
    except Exception as error:
        row["one"], row["said"] = "foreign", spoken(error)
        row["trace"] = traceback.format_exc().splitlines()[-12:]
    if row["one"] == "exact":
        try:
            compared_over_ranks(row, reference)
        except lr.errors.LongringError as error:
            row["ranks"], row["ranks_said"] = "refused", spoken(error)
        except Exception as error:
            row["ranks"], row["ranks_said"] = "foreign", spoken(error)
            row["trace"] = traceback.format_exc().splitlines()[-12:]
    return row


def spoken(error: BaseException) -> str:
    said = re.sub(r"^rank \d+: ", "", " ".join(str(error).split()))
    said = re.sub(r"'/[^']*/site-packages/", "'", said)  # where packages are installed is of one machine
    from longring.errors import LongringError

    return said if isinstance(error, LongringError) else f"{type(error).__name__}: {said}"[:200]


class Failed(Exception):
    """The reference itself does not run here."""


class Reference:
    """A model by sdpa or eager: its inputs, outputs, loss and gradients."""

    def __init__(self, model: Any, by: str, given: dict[str, Any]) -> None:
        self.model, self.by, self.given = model, by, given
        self.results = measured(model, given)

    @classmethod
    def of(cls, config: Any, made: Any) -> Reference:
        """By the first of the candidates that runs."""
        import torch
        from tiny_configs import candidates, inputs

        first, began = None, time.process_time()
        for candidate in candidates(config):
            for by in ("sdpa", "eager") if made._supports_sdpa else ("eager",):
                for images in (True, False) if made.main_input_name == "input_ids" else (True,):
                    if time.process_time() - began > 3:
                        raise first or Failed("it takes too long")
                    try:
                        with torch.device("meta"):
                            size = sum(x.numel() for x in build(made, candidate, by).parameters())
                        if size > 40_000_000:
                            raise Failed(f"{size / 1e6:.0f} million parameters from a tiny config")
                        model = with_weights(build(made, candidate, by))
                        given = inputs(model, images=images)
                        reference = cls(model, by, given)
                        if not all(x.isfinite().all() for x in reference.results.values()):
                            raise Failed("its outputs are not finite")
                        return reference
                    except Exception as error:
                        first = first or error
        raise first or Failed("no config of it can be made")


def build(made: Any, config: Any, by: str) -> Any:
    import torch
    from watching import Watch

    with Watch():
        torch.manual_seed(0)
        config = copy.deepcopy(config)
        config._experts_implementation = "eager"  # the others know no float64
        return made._from_config(config, attn_implementation=by).to(torch.float64).eval()


def with_weights(model: Any) -> Any:
    """Initial weights make all scores nearly equal."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.is_floating_point() and not re.search(r"A_log|dt_|\bD\b|decay", name):
                noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
                scale = 1.5 * x[0].numel() ** -0.5 if x.ndim > 1 and "embed" not in name else 0.3
                x.add_(noise, alpha=scale)
    return model


def flattened(x: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of an output, without what caches hold."""
    import torch

    if isinstance(x, torch.Tensor):
        if x.is_floating_point():
            yield name, x
    elif isinstance(x, dict):
        for key, part in x.items():
            if key not in ("past_key_values", "attentions", "cross_attentions", "cache_params", "memory"):
                yield from flattened(part, f"{name}.{key}".strip("."))
    elif isinstance(x, (list, tuple)):
        for i, part in enumerate(x):
            yield from flattened(part, f"{name}.{i}".strip("."))


def measured(model: Any, given: dict[str, Any], counts: Any = None) -> dict[str, Any]:
    """Every output, a loss that all of them have a part in, and every gradient."""
    import torch
    from watching import Watch

    given = wide(given)
    model.zero_grad()
    with Watch() as watch:
        torch.manual_seed(3)
        outputs = dict(flattened(model(**given)))
        if not outputs:
            raise Failed("it gives no output that can be compared")
        loss = sum((x * noise(x)).sum() for x in outputs.values())
        if "logits" in outputs and "input_ids" in given and outputs["logits"].ndim == 3:
            logits, ids = outputs["logits"], given.get("decoder_input_ids", given["input_ids"])
            if logits.shape[1] == ids.shape[1]:
                loss = loss + torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        if loss.requires_grad:
            loss.backward()
    if counts is not None:
        counts.update(watch.elsewhere)
    results = {f"output {name}": x.detach() for name, x in outputs.items()} | {"loss": loss.detach()}
    return results | {f"gradient {n}": x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}


def wide(given: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in given.items()}


def noise(x: Any) -> Any:
    import torch

    return torch.randn(x.shape, generator=torch.Generator().manual_seed(11), dtype=x.dtype)


def difference(got: dict[str, Any], want: dict[str, Any]) -> str | None:
    """The largest, where it is more than rounding."""
    import torch

    if got.keys() != want.keys():
        return f"other results: {sorted(got.keys() ^ want.keys())[:3]}"
    gradients = [x.norm() for name, x in want.items() if name.startswith("gradient")]
    size = float(torch.stack(gradients).norm()) if gradients else 0.0
    worst = (0.0, "")
    for name, x in want.items():
        if got[name].shape != x.shape:
            return f"{name} has shape {list(got[name].shape)}, not {list(x.shape)}"
        error = float((got[name] - x).norm())
        allowed = 1e-8 * float(x.norm()) + (1e-11 * size if name.startswith("gradient") else 1e-12)
        worst = max(worst, (error / allowed if error == error else float("inf"), name))
    return f"{worst[1]} differs by {worst[0]:.1e} of what is allowed" if worst[0] > 1 else None


def compared(row: dict[str, Any], reference: Reference) -> None:
    import torch
    from watching import calls

    model = build(type(reference.model), reference.model.config, "longring")
    model.load_state_dict(reference.model.state_dict())
    counts: Counter[str] = Counter()
    before = calls()
    results = measured(model, reference.given, counts)
    row["calls"], row["elsewhere"] = calls() - before, sorted(counts)
    wrong = difference(results, reference.results)
    row["one"], row["said"] = ("wrong", wrong) if wrong else ("exact", "")
    if row["one"] == "exact" and not row["calls"] and counts:
        row["one"], row["said"] = "bypass", f"attention by {', '.join(sorted(counts))} alone"
    if row["one"] != "exact":
        return
    row["silent_attentions"] = gives_no_attentions(model, reference)
    ids = reference.given.get("input_ids")
    if ids is not None and "attention_mask" in inspect.signature(type(model).forward).parameters:
        mask = torch.ones_like(ids)
        mask[1, -4:] = 0
        given = {**reference.given, "attention_mask": mask}
        with contextlib.suppress(Exception):
            want = measured(reference.model, given)
            row["padded"] = None
            try:
                wrong = difference(measured(model, given), want)
                row["padded"] = wrong or "exact"
                if wrong:
                    row["one"], row["said"] = "wrong", f"padded: {wrong}"
            except Exception as error:
                row["padded"] = spoken(error)
                from longring.errors import LongringError

                if not isinstance(error, LongringError):
                    row["one"], row["said"] = "foreign", f"padded: {spoken(error)}"


def gives_no_attentions(model: Any, reference: Reference) -> bool:
    """Whether attention weights that sdpa's sibling eager returns are left out without a word."""
    from watching import Watch

    from longring.errors import LongringError

    given = wide(reference.given)
    try:
        with Watch():
            other = build(type(reference.model), reference.model.config, "eager")
            want = weights_of(other(**given, output_attentions=True))
        if not want:
            return False
    except Exception:
        return False
    try:
        with Watch():
            got = weights_of(model(**given, output_attentions=True))
    except LongringError:
        return False
    return got < want


def weights_of(outputs: Any) -> int:
    found = [x for name, part in outputs.items() if name.endswith("attentions") for x in (part or ())]
    return sum(x is not None for x in found)


def compared_over_ranks(row: dict[str, Any], reference: Reference) -> None:
    """Text is dealt, all else is given whole; what is no text at all must be refused."""
    import torch
    from watching import Watch

    import longring as lr
    from longring.integrations.transformers import shard_batch, sharded
    from longring.testing import run_ranks

    model = build(type(reference.model), reference.model.config, "longring")
    model.load_state_dict(reference.model.state_dict())
    models = [model, copy.deepcopy(model)]
    given = wide(reference.given)
    ids = given.pop("input_ids", None)
    one = threading.Lock()

    def program(group: Any) -> Any:
        made = models[group.rank]
        made.zero_grad()
        n = 12 if ids is None else ids.shape[1]
        s = lr.Sharding(n, group, "zigzag")
        batch = shard_batch(torch.zeros(2, n, dtype=torch.long) if ids is None else ids, s)
        inputs = {} if ids is None else dict(batch.inputs)
        if ids is not None:
            inputs["position_ids"] = inputs["position_ids"] + first_position(made)
        with Watch() as watch, sharded(batch, timeout=30.0):
            outputs = dict(flattened(made(**given, **inputs)))
        with Watch():
            results, loss = {}, torch.zeros((), dtype=torch.float64)
            for name, x in outputs.items():
                whole = reference.results.get(f"output {name}")
                if whole is None or whole.ndim < 2 or whole.shape[1] != n or x.shape[1] != s.local_length:
                    continue
                results[f"output {name}"] = s.unshard(x.detach())
                loss = loss + (x * s.shard(noise(whole))).sum()
            loss.backward()
        with one:
            elsewhere.update(watch.elsewhere)
        return results

    elsewhere: Counter[str] = Counter()
    parts = run_ranks(2, program)
    got = dict(parts[0])
    if not got:
        row["ranks"], row["ranks_said"] = "bypass", "it gave outputs that are not those of tokens, and refused nothing"
        return
    want = over_tokens(reference, got)
    zero = [dict(m.named_parameters()) for m in models]
    for name in (n for n in want if n.startswith("gradient")):
        parts_of = [x for z in zero if (x := z[name.removeprefix("gradient ")].grad) is not None]
        got[name] = sum(parts_of) if parts_of else 0 * want[name]
    wrong = difference(got, want)
    row["ranks"], row["ranks_said"] = ("wrong", wrong) if wrong else ("exact", "")
    if elsewhere and not wrong:
        row["ranks"], row["ranks_said"] = "bypass", f"attention by {', '.join(sorted(elsewhere))} went unnoticed"


def over_tokens(reference: Reference, got: dict[str, Any]) -> dict[str, Any]:
    """What sdpa gives for the outputs that are compared over ranks, and the gradients of these alone."""
    from watching import Watch

    given = wide(reference.given)
    model = reference.model
    model.zero_grad()
    with Watch():
        outputs = dict(flattened(model(**given)))
        loss = sum((x * noise(x)).sum() for name, x in outputs.items() if f"output {name}" in got)
        loss.backward()
    results = {f"output {name}": x.detach() for name, x in outputs.items() if f"output {name}" in got}
    return results | {f"gradient {n}": x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}


def first_position(model: Any) -> int:
    """Of RoBERTa and its like, as docs/transformers.md says."""
    for name, table in model.named_modules():
        if name.endswith(("position_embeddings", "embed_positions")):
            padding = getattr(table, "padding_idx", None)
            return 0 if padding is None else padding + 1
    return 0


# ---------------------------------------------------------------------------------------------------- all of them


def architectures() -> list[str]:
    import transformers.models.auto.modeling_auto as auto

    covered: set[str] = set()
    names = []
    for mapping, attribute in MAPPINGS.items():
        kinds = list(getattr(auto, attribute + "_NAMES"))
        names += [f"{mapping}/{kind}" for kind in kinds if mapping != "base" or kind not in covered]
        covered |= set(kinds)
    return names


class Workers:
    """Processes that examine one architecture after another; one that takes too long is ended, and said so."""

    def __init__(self, names: list[str], heard: Callable[[dict[str, Any]], None], end: float) -> None:
        self.names, self.heard, self.lock, self.end = iter(names), heard, threading.Lock(), end

    def run(self, count: int) -> None:
        threads = [threading.Thread(target=self.live) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def live(self) -> None:
        process = None
        while (name := self._next()) is not None:
            process = process or started()
            late = threading.Timer(LIMIT, process.kill)
            late.start()
            try:
                process.stdin.write(name + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = ""
            late.cancel()
            if not line:
                process.kill()
                process.wait()
                process = None
            row = {"name": name, **NOT_RUN, "said": f"died, or took more than {LIMIT:.0f} s"}
            with self.lock:
                self.heard(json.loads(line) if line else row)
        if process is not None:
            process.stdin.close()
            process.wait()

    def _next(self) -> str | None:
        with self.lock:
            return next(self.names, None) if time.monotonic() < self.end else None


def started() -> Any:
    command = [sys.executable, __file__, "--worker"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    quiet = None if os.environ.get("LOUD") else subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=quiet, text=True, env=environment
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="as causal-lm/llama; all if none is given")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help="put the rows of these names into the record, too")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="what is left then is not run")
    parser.add_argument("--page", action="store_true", help="write the page from the record alone")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    if asked.worker:
        return worker()
    if asked.page:
        return write_page()
    rows: list[dict[str, Any]] = []

    def heard(row: dict[str, Any]) -> None:
        rows.append(row)
        print(f"{len(rows)} {row['name']}: {row['one']}, {row.get('ranks')}", file=sys.stderr, flush=True)
        if asked.names and not asked.again:
            print(json.dumps(row), flush=True)

    order, known = architectures(), {}
    if asked.again and RECORD.exists():
        known = {row["name"]: row for row in json.loads(RECORD.read_text())["rows"]}
    names = asked.names or [name for name in order if known.get(name, NOT_RUN)["one"] == "not run"]
    os.nice(0 if asked.names and not asked.again else 5)
    Workers(names, heard, time.monotonic() + 60 * asked.minutes).run(asked.processes)
    if asked.again or not asked.names:
        known |= {row["name"]: row for row in rows}
        write_record([known.get(name, {"name": name, **NOT_RUN}) for name in order])
        write_page()
    return None


def write_record(rows: list[dict[str, Any]]) -> None:
    import torch
    import transformers

    for row in rows:
        for name in ("trace", "seconds", "parameters"):
            row.pop(name, None)
    record = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0], "rows": rows}
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    RECORD.write_text(json.dumps({**record, "rows": []})[:-2] + "\n" + lines + "\n]}\n")


def write_page() -> None:
    PAGE.write_text(page(json.loads(RECORD.read_text())))


def page(record: dict[str, Any]) -> str:
    rows = record["rows"]
    built = [row for row in rows if row["one"] not in ("not built", "not run")]
    left = [row for row in rows if row["one"] == "not run"]
    exact = [row for row in built if row["one"] == "exact"]
    return f"""# Which models of Transformers

<!-- python benchmarks/hugging_face.py writes this page and docs/records/hugging_face.json -->

What [`attn_implementation="longring"`](transformers.md) gives for the {len(rows)} architectures of AutoModel in
transformers {record["transformers"]}, of which {len(built)} were built here: tiny configs, random weights,
float64, torch {record["torch"]} on a CPU. *Exact*: all outputs, the loss and the gradients of all parameters are those
of `sdpa` (of `eager`, where a model has no `sdpa`), plain and, where there is an `attention_mask`, with padding behind
the tokens. *Over ranks*: for those exact in one process, the outputs and the summed gradients of two virtual ranks
within `sharded`. Composite models were given text, and images only where that needs no processor.

{summary(rows)}
Every refusal is an error of longring with the line shown, which is that of the first architecture named. Exact in one
process and refused over ranks are {sum(row["ranks"] == "refused" for row in exact)}: the line says what such a
model does besides attention, or which of its attention knows no positions.

## Computed

{table([row for row in built if row["one"] not in ("refused",)])}
## Refused

{table([row for row in built if row["one"] == "refused"])}
## Not built here

By `sdpa` or `eager` from a tiny config: a package is missing, or the config or a generic input does not fit. Nothing is
known of these.

{table([row for row in rows if row["one"] == "not built"])}
## Not run

Nor is anything known of these, to which the command has not come, or which took too long:
`python benchmarks/hugging_face.py --again`.

{", ".join(row["name"].partition("/")[2] for row in left) or "None."}
"""


def summary(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| AutoModel | architectures | built | exact | refused | wrong | foreign errors | silent bypasses "
        "| over ranks: exact | refused | wrong | foreign errors | silent bypasses |",
        "|---|" + "---:|" * 12,
    ]
    for mapping in [*MAPPINGS, "all"]:
        its = [row for row in rows if mapping in ("all", row["name"].partition("/")[0])]
        one, ranks = (Counter(row.get(key) for row in its) for key in ("one", "ranks"))
        counts = [len(its), len(its) - one["not built"] - one["not run"]]
        counts += [one[state] for state in ("exact", "refused", "wrong", "foreign", "bypass")]
        counts += [ranks[state] for state in ("exact", "refused", "wrong", "foreign", "bypass")]
        lines.append(f"| {mapping} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> str:
    """Architectures of which the same is said, together; of the first of them what is said is shown."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        said = row["said"] or row.get("ranks_said") or ""
        alike = re.sub(r"\S*\d\S*|\S*\.\S*|\b\w*[A-Z]\w*\b|\([^)]*\)", "", said)
        groups.setdefault((row["one"], row.get("ranks") or "", alike), []).append(row)
    lines = ["| in one process | over ranks | what is said | architectures |", "|---|---|---|---|"]
    order = sorted(groups.items(), key=lambda group: (group[0][:2], -len(group[1])))
    for (one, ranks, _), its in order:
        said = (its[0]["said"] or its[0].get("ranks_said") or "").replace("|", "\\|").replace("<", "&lt;")
        said = re.sub(r"([_*`])", r"\\\1", said)
        names = ", ".join(f"{row['name'].partition('/')[2]}" for row in its)
        lines.append(f"| {one} | {ranks} | {said} | {names} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
