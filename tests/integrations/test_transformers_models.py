"""The command that sweeps the architectures of Transformers: a sample of them, and the committed record of all."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks/hugging_face.py"
BY_SOURCE = "has attention that does not go through the AttentionInterface"
NO_TENSOR = "works on its attention mask as a tensor"
SAMPLE = {  # in one process, over ranks, and what is said
    "causal-lm/llama": ("exact", "exact", ""),
    "causal-lm/gpt2": ("exact", "exact", ""),
    "causal-lm/mixtral": ("exact", "exact", ""),
    "masked-lm/modernbert": ("exact", "exact", ""),
    "image-text-to-text/kosmos-2.5": ("exact", "exact", ""),
    "seq2seq-lm/m2m_100": ("exact", "refused", "takes no position_ids"),
    "causal-lm/qwen3_next": ("exact", "refused", "linear_attention"),
    "causal-lm/mamba": ("exact", "refused", "without calling longring"),
    "base/vit": ("exact", "refused", "has a convolution"),
    "base/clip": ("exact", "refused", "without asking transformers for a mask"),
    "causal-lm/gemma2": ("refused", None, "softcap"),
    "causal-lm/gpt_oss": ("refused", None, "sinks"),
    "causal-lm/llama4_text": ("refused", None, "chunked_overlay"),
    "causal-lm/deepseek_v3": ("refused", None, "keys of 12 numbers and values of 8"),
    "seq2seq-lm/mt5": ("refused", None, "position_bias"),
    "causal-lm/falcon": ("refused", None, BY_SOURCE),
    "causal-lm/openai-gpt": ("refused", None, BY_SOURCE),
    "masked-lm/rembert": ("refused", None, BY_SOURCE),
    "causal-lm/doge": ("refused", None, NO_TENSOR),
    "causal-lm/hy_v4": ("refused", None, NO_TENSOR),
    "base/swin": ("refused", None, "given as a tensor"),
}


def loaded():
    spec = importlib.util.spec_from_file_location("hugging_face_sweep", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.processes
@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_every_kind(part):
    """In several processes, for the sake of a slow machine."""
    sample = dict(list(SAMPLE.items())[part::4])
    command = [sys.executable, PROGRAM, "--processes", "1", *sample]
    done = subprocess.run(command, capture_output=True, text=True, timeout=115)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows.keys() == sample.keys()
    for name, (one, ranks, said) in sample.items():
        row = rows[name]
        assert (row["one"], row["ranks"]) == (one, ranks), row
        assert said in row["said"] + row["ranks_said"], row
        assert one == "refused" or not row["silent_attentions"], row


def test_the_record_has_nothing_wrong_and_is_of_this_major_version():
    record = json.loads((ROOT / "docs/records/hugging_face.json").read_text())
    assert record["transformers"].partition(".")[0] == transformers.__version__.partition(".")[0]
    states = {row[key] for row in record["rows"] for key in ("one", "ranks")}
    assert states <= {"exact", "refused", "not built", "not run", None}  # none wrong, foreign or a bypass
    assert not any(row.get("silent_attentions") for row in record["rows"])
    built = [row for row in record["rows"] if row["one"] in ("exact", "refused")]
    assert len(built) > len(record["rows"]) / 3
    assert all(row["said"] for row in record["rows"] if row["one"] in ("refused", "not built"))
    assert all(row["ranks_said"] for row in record["rows"] if row["ranks"] == "refused")
    if record["transformers"] == transformers.__version__:
        assert [row["name"] for row in record["rows"]] == loaded().architectures()


def test_the_page_is_of_the_record():
    sweep = loaded()
    assert sweep.PAGE.read_text() == sweep.page(json.loads(sweep.RECORD.read_text()))
