"""Records as the commands print them with --json, with likely numbers: what reports are made from in tests."""

from __future__ import annotations

from typing import Any

NASTY = '<script>document.title = "taken"</script>"\'&<img src=x onerror=alert(1)>'
COMPONENTS = ("q", "k", "v", "out", "lse", "kv_buffers", "partials", "dq", "dk", "dv", "travelling_gradients")
QUANTITIES = ("out", "lse", "dq", "dk", "dv")


def envelope(command: str, **arguments: Any) -> dict[str, Any]:
    return {
        "command": command,
        "arguments": {"tokens": 16384, "ranks": 4, "nodes": 1, "heads": 8, "kv_heads": 2, "head_dim": 64, **arguments},
        "versions": {"longring": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
        "machine": {"system": "Linux", "processor": "x86_64", "cores": 2, "gpus": []},
        "real": "4 real processes of this machine over Gloo",
        "simulated": "nothing",
    }


def _components(total: int) -> dict[str, int]:
    shares = [total * (7 + index) // 150 for index in range(len(COMPONENTS) - 1)]
    return dict(zip(COMPONENTS, [*shares, total - sum(shares)], strict=True))


def _spread(seconds: float) -> dict[str, Any]:
    return {"median": seconds, "low": 0.96 * seconds, "high": 1.07 * seconds, "runs": 9}


# ------------------------------------------------------------------------------------------------ bench


PEERS = (
    ("ring", "ours", "ring", "zigzag", 1.0),
    ("gather", "ours", "gather", "zigzag", 1.08),
    ("ulysses", "ours", "ulysses", "contiguous", 1.13),
    ("DeepSpeed Ulysses", "package", None, None, 1.31),
    ("FSDP users: every rank all", "re-created", None, None, None),
)


def bench() -> dict[str, Any]:
    rows = [
        _bench_row(*peer, tokens=tokens, ranks=ranks, phase=phase)
        for tokens in (4096, 16384)
        for ranks in (1, 4)
        for phase in ("forward", "both")
        for peer in PEERS
    ]
    wrong = {**rows[-1], "name": f"peer {NASTY}", "kind": "package", "note": f"wrong by a mile {NASTY}"}
    wrong["errors"] = {**wrong["errors"], "dv": 0.37}
    return {
        **envelope("bench", preset="report", causal=True),
        "rows": [*rows, wrong],
        "missing": [f"flash-attn: needs a GPU {NASTY}"],
        "failures": [],
    }


def _bench_row(
    name: str,
    kind: str,
    schedule: str | None,
    layout: str | None,
    times: float | None,
    *,
    tokens: int,
    ranks: int,
    phase: str,
) -> dict[str, Any]:
    work = 1.9e-9 * tokens**2 * (1 if phase == "forward" else 3.4)
    seconds = work if times is None else work * times / ranks**0.93
    peak = 64 * tokens * 8 * (4 if times is None else 16 // ranks)
    return {
        "scenario": "ranks",
        "case": "causal",
        "name": name,
        "kind": kind,
        "phase": phase,
        "tokens": tokens,
        "ranks": ranks,
        "schedule": schedule,
        "layout": layout,
        "kernel": "sdpa",
        "time": _spread(seconds),
        "tflops": 4 * 0.5 * tokens**2 * 64 * 8 / seconds / 1e12,
        "ratios": {"of ring": seconds / (work / ranks**0.93)},
        "errors": dict.fromkeys(QUANTITIES, 2.1e-07),
        "allowed": dict.fromkeys(QUANTITIES, 1.3e-06),
        "peak_bytes": peak,
        "components": _components(peak),
        "predicted_bytes": int(0.98 * peak) if kind == "ours" else None,
        "predicted_components": _components(int(0.98 * peak)) if kind == "ours" else None,
        "predicted_seconds": 0.93 * seconds if kind == "ours" else None,
        "note": None,
    }


# ------------------------------------------------------------------------------------------------ profile


def profile(ranks: int = 4) -> dict[str, Any]:
    return {
        **envelope("profile", schedule="ring", layout="zigzag", causal=True, ranks=ranks),
        "ranks": [_profiled(rank, ranks) for rank in range(ranks)],
        "overlap": 0.873,
        "schedule": "ring",
        "layout": "zigzag",
    }


def _profiled(rank: int, ranks: int) -> dict[str, Any]:
    peak = 96 * 2**20 + rank * 4096
    spans = [span for phase in ("forward", "backward") for step in range(ranks) for span in _spans(rank, phase, step)]
    return {
        "rank": rank,
        "spans": spans,
        "memory": [{"at": span["end"], "bytes": peak // 2 + index * 10**6} for index, span in enumerate(spans[:40])],
        "peak_bytes": peak,
        "predicted_bytes": peak - 2**20,
        "components": _components(peak),
        "predicted": _components(peak - 2**20),
    }


def _spans(rank: int, phase: str, step: int) -> list[dict[str, Any]]:
    slow = 1.0 if phase == "forward" else 2.5
    start = 0.002 * rank + (step * 0.031 if phase == "forward" else 0.14 + step * 0.08)
    words = {"phase": phase, "step": step}
    times = {
        "send": (start, start + 0.012 * slow, 2**21),
        "compute": (start + 0.001, start + 0.024 * slow, None),
        "merge": (start + 0.024 * slow, start + 0.026 * slow, None),
        "wait": (start + 0.026 * slow, start + 0.03 * slow, None),
    }
    return [
        {"kind": kind, "what": f"{kind} of step {step}", **words, "start": first, "end": last, "bytes": size}
        for kind, (first, last, size) in times.items()
    ]


# ------------------------------------------------------------------------------------------------ replay and plan


def replay() -> dict[str, Any]:
    forward = {
        "seconds": 41.7,
        "flops": 2.2e12,
        "tflops": 0.0528,
        "peak_bytes": 98_566_144,
        "predicted_bytes": 97_517_568,
        "predicted_seconds": 39.2,
        "bytes_received": 264_241_152,
        "bytes_sent": 264_241_152,
    }
    checks = [
        {
            "quantity": quantity,
            "rows": [37 * 16384 + 977 * index for index in range(8)],
            "error": 3.3e-7,
            "allowed": 1.5e-6,
            "ok": True,
        }
        for quantity in QUANTITIES
    ]
    return {
        **envelope("replay", tokens=2**20, ranks=64, schedule="ring", layout="zigzag", causal=True),
        "rank": 37,
        "ranks": 64,
        "tokens": 2**20,
        "local_tokens": 16384,
        "phases": {"forward": forward, "backward": {**forward, "seconds": 118.3, "peak_bytes": 168_566_144}},
        "checks": checks,
        "ok": True,
    }


def plan() -> dict[str, Any]:
    names = (("ring", "zigzag"), ("ulysses", "contiguous"), ("hybrid", "zigzag"), ("gather", "zigzag"))
    choices = [
        {
            "schedule": schedule,
            "layout": layout,
            "forward": {"seconds": 0.021 * (1 + index / 7), "tflops": 512.0},
            "backward": {"seconds": 0.057 * (1 + index / 7), "tflops": 431.0},
            "memory": {"components": _components(2**30 << index), "peak_bytes": 2**30 << index},
            "efficiency": 0.97 - 0.1 * index,
            "balance": 1.0,
        }
        for index, (schedule, layout) in enumerate(names)
    ]
    return {
        **envelope("plan", tokens=10**6, ranks=64, nodes=8, heads=32, kv_heads=8, causal=True, hardware="h200"),
        "choices": choices,
        "recommended": {"schedule": "ring", "layout": "zigzag", "reason": "communication hides behind computing"},
        "longest_tokens": 14_000_000,
    }


EXAMPLES = {"bench": bench, "profile": profile, "replay": replay, "plan": plan}
