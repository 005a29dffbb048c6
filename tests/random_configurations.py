"""Random configurations of attention: drawn from (seed, index), run on any device, judged against float64.

Nothing here needs pytest: benchmarks/random_gpu.py runs as many as fit a time limit, tests/gpu and tests a few of a
fixed seed. What a configuration costs is bounded by `Limits`; all else is open.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

import longring as lr
from longring.errors import KernelRefusal, RowsLeftOut
from longring.geometry.layouts import Layout, deal
from longring.schedules.buffers import release_buffers
from longring.testing import Result
from longring.testing.sampled import Columns, Given, Rows, Sum, error_ratios, exact_columns, exact_rows, lse_ratios

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
FAR = 32_768  # tokens from which a dilated pattern over ranks is as long as those that once failed
SMALL = 1 << 20  # pairs of all heads up to which every row and key is judged
EDGES, OTHERS = 20, 12  # sampled rows, and as many keys: at edges of shards, documents and segments, and elsewhere

RIGHT, WRONG, REFUSED = "right", "wrong", "refused"
ILLEGAL, NO_MEMORY, OTHER = "illegal access", "out of memory", "other error"
HANG, CRASH = "hang", "crash"  # seen from outside only
FAILURES = (WRONG, ILLEGAL, HANG, CRASH, NO_MEMORY, OTHER)


@dataclass(frozen=True)
class Limits:
    """What bounds a configuration: part of what is drawn, besides (seed, index)."""

    device: str = "cuda"
    most_tokens: int = 200_000
    numbers: int = 1 << 27  # of q, in 16 bits; half as many in float32
    flops: float = 5e13  # of both passes in 16 bits, a tenth in float32, as they take about as long
    tiles: int = 8_000  # groups of positions, roughly: each is cut, planned and packed in Python
    odd_heads: float = 0.3  # how often d is no usual one: Triton compiles for every d and dtype

    @staticmethod
    def of(device: str, most_tokens: int | None = None) -> Limits:
        if device == "cuda":
            return Limits() if most_tokens is None else Limits(most_tokens=most_tokens)
        return Limits(device, most_tokens or 300, numbers=1 << 16, flops=2e9, tiles=400)

    @property
    def sanitized(self) -> Limits:
        """Every access is watched, which takes 10 to 50 times as long."""
        return replace(
            self, most_tokens=min(self.most_tokens, 8192), numbers=1 << 20, flops=1e10, tiles=300, odd_heads=0.1
        )


@dataclass(frozen=True)
class Configuration:
    """One call, forward and backward. Numbers, strings and lists only: it travels as JSON."""

    seed: int
    index: int
    kind: str  # "dense", "window", "documents", "lengths", "dilated mod", "dilated block", "dilated documents"
    n_q: int
    n_k: int
    batch: int
    heads: int
    kv_heads: int
    d: int
    dtype: str
    causal: bool
    window: list[int] | None = None
    documents: list[Any] | None = None
    lengths: list[int] | None = None
    segments: list[int] | None = None
    rates: list[int] | None = None
    phase: str = "mod"
    query_offset: int | None = None
    ranks: int = 0  # 0: lr.attention on one device; otherwise virtual ranks
    layout: str = "auto"
    align: int | None = None
    schedule: str = "auto"
    node_ranks: int | None = None
    kernel: str = "auto"
    scale: float | None = None
    deterministic: bool = False
    with_dlse: bool = False
    memory: str = "plain"  # or another of MEMORY
    dout_expanded: bool = False  # one number seen as a tensor, as of out.sum().backward()

    def to_json(self) -> str:
        plain = {each.name: each.default for each in fields(self)}
        return json.dumps({name: value for name, value in asdict(self).items() if value != plain[name]})

    @staticmethod
    def from_json(text: str) -> Configuration:
        return Configuration(**json.loads(text))

    @property
    def pattern(self) -> lr.Dense | lr.Dilated:
        if self.segments is not None:
            assert self.rates is not None
            told = {"causal": self.causal, "phase": self.phase, "documents": self.documents}
            return lr.Dilated(self.segments, self.rates, **told)
        window = None if self.window is None else (self.window[0], self.window[1])
        return lr.Dense(self.causal, window, self.documents, self.lengths)

    @property
    def is_far(self) -> bool:
        """Dilated over ranks, and long."""
        return self.segments is not None and self.ranks > 1 and max(self.n_q, self.n_k) >= FAR

    @property
    def offset(self) -> int:
        return self.n_k - self.n_q if self.query_offset is None else self.query_offset

    @property
    def facts(self) -> dict[str, str]:
        """By what configurations are counted."""
        return {
            "schedule": self.schedule if self.ranks else "one device",
            "pattern": self.kind,
            "dtype": self.dtype,
            "kernel": self.kernel,
            "tokens": f"10^{int(math.log10(max(self.n_q, self.n_k)))}",
            "ranks": str(self.ranks),
            "layout": self.layout if self.ranks else "one device",
        }


# ------------------------------------------------------------------------------------------------------ drawing


def draw(seed: int, index: int, limits: Limits) -> Configuration:
    """The same for the same (seed, index) and limits, on every machine."""
    draw = Random(f"{seed}/{index}")
    is_far = draw.random() < 0.15 and limits.most_tokens > FAR
    n_k = log_uniform(draw, FAR if is_far else 1, limits.most_tokens)
    kind = draw.choice(["dilated mod", "dilated block", "dilated documents"] if is_far else KINDS)
    n_q = n_k if draw.random() < 0.8 else log_uniform(draw, 1, limits.most_tokens)
    if is_far:
        n_q = max(n_q, FAR)
    dtype = draw.choice(["bfloat16", "bfloat16", "float16", "float32"])
    if limits.device == "cpu":
        dtype = draw.choice(["float32", "float32", "float64", "bfloat16", "float16"])
    kv_heads = draw.choice([1, 1, 2, 2, 3, 4, 4, 5, 8, 8, 12, 16, 32])
    heads = kv_heads * draw.choice([share for share in (1, 1, 1, 2, 3, 4, 7, 8, 16, 32) if kv_heads * share <= 32])
    drawn = Configuration(
        seed,
        index,
        kind,
        n_q,
        n_k,
        batch=draw.choice([1, 1, 1, 2, 3]),
        heads=heads,
        kv_heads=kv_heads,
        d=draw.choice(COMMON_DIMS if draw.random() >= limits.odd_heads else OTHER_DIMS),
        dtype=dtype,
        causal=draw.random() < 0.6,
        phase="block" if kind == "dilated block" or (draw.random() < 0.2 and kind == "dilated documents") else "mod",
        with_dlse=draw.random() < 0.4,
        memory=draw.choice(MEMORY),
        dout_expanded=draw.random() < 0.06,
        scale=draw.choice([None, None, None, None, -0.11, 0.3, 1e-3, -1e-4]),
        kernel=_kernel(draw, dtype, limits.device),
    )
    if n_q != n_k and draw.random() < 0.5:
        drawn = replace(drawn, query_offset=draw.randint(-n_q // 4, n_k))
    drawn = _over_ranks(draw, drawn, is_far)
    return _bounded(draw, drawn, limits)


KINDS = [
    *("dense", "dense", "window", "window", "documents", "documents", "lengths"),
    *("dilated mod", "dilated mod", "dilated block", "dilated documents"),
]
# rows of a head that follow each other; k and v in one tensor; rows that begin at no multiple of 16 bytes
MEMORY = [*["plain"] * 7, "heads first", "packed", "unaligned"]
COMMON_DIMS = [16, 32, 64, 64, 64, 128, 128, 128]
OTHER_DIMS = [20, 24, 33, 40, 48, 72, 80, 96, 112, 160, 192, 200, 256, 256]
ON_CUDA = [*["auto"] * 8, *["triton"] * 4, "flash", "flash", "efficient", "efficient", "cudnn", "sdpa", "reference"]
ON_CUDA_IN_FLOAT32 = [*["auto"] * 5, *["triton"] * 4, *["efficient"] * 2, "sdpa", "reference", "flash"]
ON_CPU = ["auto", "auto", "auto", "sdpa", "reference"]
RING_LIKE = ["auto", "auto", "ring", "ring", "exchange", "exchange", "bidirectional", "gather", "ulysses"]
BY_NODE = ["double_ring", "hybrid"]


def _kernel(draw: Random, dtype: str, device: str) -> str:
    on_cuda = ON_CUDA_IN_FLOAT32 if dtype == "float32" else ON_CUDA
    return draw.choice(on_cuda if device == "cuda" else ON_CPU)


def _over_ranks(draw: Random, drawn: Configuration, is_far: bool) -> Configuration:
    if not is_far and draw.random() < 0.3:
        return replace(drawn, deterministic=draw.random() < 0.4)
    ranks = draw.choice([2, 2, 3, 4, 4, 5, 7, 8, 8, 11, 12, 16, 16] if is_far else [1, *range(2, 17), 2, 4, 8])
    schedule = draw.choice([*RING_LIKE, *BY_NODE])
    layouts = ["auto", "contiguous", "contiguous", "zigzag", "striped"]
    if drawn.kind.endswith("documents") and drawn.n_q == drawn.n_k:
        layouts += ["dealt", "dealt"]
    layout = draw.choice(layouts)
    align = draw.choice([2, 7, 64, 128]) if layout in ("contiguous", "zigzag") and draw.random() < 0.2 else None
    nodes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    inner = [size for size in nodes if 1 < size < ranks] or nodes
    node_ranks = draw.choice(inner) if schedule in BY_NODE or draw.random() < 0.3 else None
    told = {"layout": layout, "align": align, "schedule": schedule, "node_ranks": node_ranks}
    return replace(drawn, ranks=ranks, **told)


def _bounded(draw: Random, drawn: Configuration, limits: Limits) -> Configuration:
    """Fewer heads, and at last fewer tokens, until it costs no more than allowed; then what depends on its length."""
    narrow = drawn.dtype in ("float16", "bfloat16")
    numbers = limits.numbers // (1 if narrow else 2)
    if drawn.schedule == "gather":
        numbers //= 1 + drawn.ranks // 4  # every rank has all keys
    flops = limits.flops / (1 if narrow else 10)
    if drawn.kernel == "reference":  # keeps blocks of scores in float32, and is launched for each
        flops, numbers = min(flops, 2e10), min(numbers, 1 << 22)
    settled = _with_pattern(draw, drawn, limits)
    while True:
        tokens = max(settled.n_q, settled.n_k)
        if tokens * settled.batch * settled.heads * settled.d <= numbers and flops_of(settled) <= flops:
            return settled
        if settled.batch > 1:
            settled = _with_pattern(draw, replace(settled, batch=1), limits)
        elif settled.heads > settled.kv_heads:
            settled = replace(settled, heads=settled.kv_heads)
        elif settled.heads > 1:
            settled = replace(settled, heads=settled.heads // 2, kv_heads=settled.kv_heads // 2)
        elif settled.d > 64:
            settled = replace(settled, d=64)
        else:
            offset = settled.query_offset if settled.query_offset is None else settled.query_offset * 3 // 4
            shorter = {"n_q": max(1, settled.n_q * 3 // 4), "n_k": max(1, settled.n_k * 3 // 4), "query_offset": offset}
            settled = _with_pattern(draw, replace(settled, **shorter), limits)


def _with_pattern(draw: Random, drawn: Configuration, limits: Limits) -> Configuration:
    n, kind = drawn.n_k, drawn.kind
    ranks = max(1, drawn.ranks)
    told: dict[str, Any] = dict.fromkeys(("window", "documents", "lengths", "segments", "rates"))
    if kind == "window":
        left = draw.choice([-1, 0, log_uniform(draw, 1, n), log_uniform(draw, 1, n)])
        right = draw.choice([-1, 0, log_uniform(draw, 1, n)])
        told["window"] = [left, right]
    if kind == "lengths" or (kind == "window" and draw.random() < 0.1):
        told["lengths"] = [draw.choice([n, draw.randint(0, n), draw.randint(0, n)]) for _ in range(drawn.batch)]
    if kind.endswith("documents"):
        # each length is a plan of cuDNN's, of a twentieth of a second
        most = 8 if drawn.kernel in ("cudnn", "sdpa") else 24 if drawn.kernel == "auto" else 400
        most = max(2, min(most, limits.tiles // ranks // (drawn.batch + 1)))
        rows = drawn.batch if draw.random() < 0.3 else 1
        lists = [boundaries(draw, n, log_uniform(draw, 1, most)) for _ in range(rows)]
        told["documents"] = lists if rows > 1 else lists[0]
        if draw.random() < 0.15 and not kind.startswith("dilated"):
            told["window"] = [log_uniform(draw, 1, n), draw.choice([-1, 0, 5])]
    if kind.startswith("dilated"):
        told["segments"], told["rates"] = _branches(draw, drawn, limits)
    return replace(drawn, **told)


def _branches(draw: Random, drawn: Configuration, limits: Limits) -> tuple[list[int], list[int]]:
    """LongNet's, each twice as long and as sparse as the last, or any: neither need divide anything."""
    n, many = drawn.n_k, draw.randint(1, 5)
    per_branch = max(1, limits.tiles // many // max(1, drawn.ranks) // (32 if drawn.layout == "striped" else 4))
    shortest = max(1, n // per_branch)
    if draw.random() < 0.4:
        first = log_uniform(draw, shortest, max(shortest, n // 4))
        return [first << i for i in range(many)], [1 << i for i in range(many)]
    segments = [log_uniform(draw, shortest, n + n // 4 + 1) for _ in range(many)]
    rates = [draw.choice([1, 2, 3, 4, 5, 7, 8, 12, 16]) for _ in range(many)]
    if draw.random() < 0.5:
        rates[draw.randrange(many)] = 1  # as in practice: else some rows see nothing
    return segments, rates


def boundaries(draw: Random, n: int, many: int) -> list[int]:
    """Uneven: some documents of a few tokens, some of half of them all."""
    cuts = {min(n - 1, max(1, round(n * draw.random() ** draw.choice([1, 1, 3])))) for _ in range(many - 1)}
    cuts |= {cut + draw.randint(1, 3) for cut in draw.sample(sorted(cuts), min(len(cuts), 2))}
    return [0, *sorted(cut for cut in cuts if 0 < cut < n), n]


def log_uniform(draw: Random, low: int, high: int) -> int:
    return min(high, max(low, round(math.exp(draw.uniform(math.log(low), math.log(high + 1))))))


def pairs_of(configuration: Configuration) -> float:
    """Of one head and batch row, roughly: what it costs, not what counts."""
    n_q, n_k, it = configuration.n_q, configuration.n_k, configuration
    if it.segments is not None:
        assert it.rates is not None
        branches = zip(it.segments, it.rates, strict=True)
        pairs = sum(max(n_q, n_k) / r * max(1, min(w, n_k) / r) for w, r in branches)
    elif it.documents is not None:
        rows = it.documents if isinstance(it.documents[0], list) else [it.documents]
        pairs = sum((b - a) ** 2 for row in rows for a, b in pairwise(row)) / len(rows)
    elif it.window is not None:
        left, right = (n_k if side == -1 else side for side in it.window)
        pairs = n_q * min(n_k, left + (0 if it.causal else right) + 1)
    else:
        pairs = n_q * n_k
    return pairs / 2 if it.causal and it.window is None else pairs


def flops_of(configuration: Configuration) -> float:
    """Of both passes."""
    width = configuration.batch * configuration.heads * max(configuration.d, 32)
    return 14.0 * pairs_of(configuration) * width


# ------------------------------------------------------------------------------------------------------ running


@dataclass
class Outcome:
    """What became of a configuration. Ratios are errors over what is allowed, the worst of every quantity."""

    configuration: Configuration
    outcome: str
    message: str = ""
    ratios: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    judging: float = 0.0  # seconds of them
    is_poisoned: bool = False  # the process cannot use its GPU any more

    @property
    def worst(self) -> float:
        return max(self.ratios.values(), default=0.0)


def run(configuration: Configuration, device: str, *, judged_on: str | None = None) -> Outcome:
    """Both passes of it, judged. Never raises for what the engine did."""
    start, found = time.monotonic(), Outcome(configuration, RIGHT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RowsLeftOut)
            x, got, again = computed(configuration, device)
            since = time.monotonic()
            found.ratios = judged(configuration, x, got, judged_on)
            if again is not None:
                same = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
                found.ratios["the same bits"] = 0.0 if same else math.inf
        found.judging = time.monotonic() - since
        if not found.worst <= 1:
            found.outcome = WRONG
            found.message = ", ".join(f"{name} {ratio:.3g} times" for name, ratio in found.ratios.items() if ratio > 1)
    except KernelRefusal as refusal:
        found.outcome, found.message = (REFUSED if configuration.kernel != "auto" else OTHER), str(refusal)
    except Exception as error:
        found.outcome, found.message = _kind_of(error), _told(error)
    found.is_poisoned = device == "cuda" and found.outcome in (ILLEGAL, OTHER) and _is_poisoned()
    if not found.is_poisoned:
        release_buffers()
        if found.outcome == NO_MEMORY:
            torch.cuda.empty_cache()
    found.seconds = time.monotonic() - start
    return found


def computed(configuration: Configuration, device: str) -> tuple[Given, Result, Result | None]:
    """What was given, and both passes' results; of a deterministic call, those of a second one too."""
    x = inputs(configuration, device)
    got = _both_passes(configuration, x)
    return x, got, _both_passes(configuration, x) if configuration.deterministic else None


def inputs(configuration: Configuration, device: str) -> Given:
    """Standard normal, drawn on the device where they are used."""
    it, dtype = configuration, DTYPES[configuration.dtype]
    digest = hashlib.sha256(f"{it.seed}/{it.index}".encode()).digest()
    random = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))

    def normal(n: int, heads: int) -> Tensor:
        is_unaligned = it.memory == "unaligned"
        size = (it.batch, heads, n, it.d) if it.memory == "heads first" else (it.batch, n, heads, it.d + is_unaligned)
        x = torch.randn(size, generator=random, dtype=dtype, device=device)
        return x.transpose(1, 2) if it.memory == "heads first" else x[..., 1:] if is_unaligned else x

    q, dout = normal(it.n_q, it.heads), normal(it.n_q, it.heads)
    if it.memory == "packed":
        k, v = normal(it.n_k, 2 * it.kv_heads).split(it.kv_heads, 2)
    else:
        k, v = normal(it.n_k, it.kv_heads), normal(it.n_k, it.kv_heads)
    if it.dout_expanded:
        dout = dout[:1, :1, :1, :1].expand(dout.shape)
    if not it.with_dlse:
        return Given(q, k, v, dout)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Given(q, k, v, dout, torch.randn(it.batch, it.heads, it.n_q, generator=random, dtype=wide, device=device))


def _both_passes(configuration: Configuration, x: Given) -> Result:
    it = configuration
    q, k, v, dout, dlse = x.with_gradients()
    told: dict[str, Any] = {"pattern": it.pattern, "kernel": it.kernel, "scale": it.scale}
    told["query_offset"] = it.query_offset
    if it.ranks:
        deals = {"ranks": it.ranks, "layout": it.layout, "align": it.align, "node_ranks": it.node_ranks}
        sim = lr.simulate(q, k, v, **told, **deals, schedule=it.schedule)
        out, lse = sim.out, sim.lse
    else:
        out, lse = lr.attention(q, k, v, **told, deterministic=it.deterministic, return_lse=True)
    _synchronize(q)  # an error of the forward is told as one
    outputs, upstream = ((out, lse), (dout, dlse)) if dlse is not None else ((out,), (dout,))
    gradients = torch.autograd.grad(outputs, (q, k, v), upstream)
    _synchronize(q)
    return Result(out.detach(), lse.detach(), *gradients)


def _synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def _kind_of(error: BaseException) -> str:
    told = _told(error)
    if "OutOfMemoryError" in told:
        return NO_MEMORY
    return ILLEGAL if any(words in told for words in IS_ILLEGAL) else OTHER


IS_ILLEGAL = ("illegal memory access", "misaligned address", "unspecified launch failure", "illegal address")


def _told(error: BaseException | None) -> str:
    """With its causes, since a rank's error is wrapped."""
    parts = []
    while error is not None and len(parts) < 4:
        trace, where = error.__traceback__, ""
        while trace is not None:
            if "longring" in trace.tb_frame.f_code.co_filename:
                where = f" ({trace.tb_frame.f_code.co_filename.rpartition('longring/')[2]}:{trace.tb_lineno})"
            trace = trace.tb_next
        parts.append(f"{type(error).__name__}: {str(error)[:600]}{where}")
        error = error.__cause__ or error.__context__
    return " <- ".join(parts)


def _is_poisoned() -> bool:
    try:
        torch.cuda.synchronize()
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError:
        return True
    return False


# ------------------------------------------------------------------------------------------------------ judging


def judged(configuration: Configuration, x: Given, got: Result, judged_on: str | None = None) -> dict[str, float]:
    """The worst ratio of every quantity, on all rows and keys where these are few, or on sampled ones."""
    it, pattern = configuration, configuration.pattern
    if judged_on is not None:
        x, got = (type(each)(*(None if t is None else t.to(judged_on) for t in each)) for each in (x, got))
    where = {"scale": it.scale, "query_offset": it.query_offset}
    rows, keys = (some.to(x.q.device) for some in sampled(it))
    want = exact_rows(x, pattern, rows, **where)
    columns = exact_columns(x, pattern, keys, got.out, got.lse, **where)
    assert want.dq is not None
    worst = {
        "out": error_ratios(got.out[:, rows], want.out).max(),
        "lse": lse_ratios(got.lse[:, :, rows], want).max(),
        "dq": error_ratios(got.dq[:, rows], want.dq).max(),
        "dk": error_ratios(got.dk[:, keys], columns.dk).max(),
        "dv": error_ratios(got.dv[:, keys], columns.dv).max(),
        "finite": torch.stack([t.isfinite().all() for t in (got.out, got.dq, got.dk, got.dv)]).all().logical_not(),
    }
    worst |= _sums(it, x, got, want, columns)
    numbers = torch.stack([each.double() for each in worst.values()]).tolist()  # one wait for all
    found = dict(zip(worst, numbers, strict=True))
    if it.kernel == "efficient" and it.dtype in ("float16", "bfloat16"):
        # its gradients of scores are made of weights that it has rounded to 16 bits: where weights are all equal, so is
        # that rounding of half a spacing, and does not cancel
        found |= {name: found[name] / 1.5 for name in ("dq", "dk")}
    if found.pop("finite"):
        found["a number that is not finite"] = math.inf
    return found


def _sums(it: Configuration, x: Given, got: Result, rows: Rows, columns: Columns) -> dict[str, Tensor]:
    """The sums of dv and dk over all keys, which no sample can miss: a row's weights sum to one, and so

        sum_j dv_j = sum_i dout_i of rows that see a key       sum_j dk_j = scale * sum_i dlse_i q_i

    Errors of keys add up at random, as far as the sampled ones may be off; those of a row's lse and delta are common to
    its keys, and where all weights are equal so are their roundings.
    """
    scale = it.d**-0.5 if it.scale is None else it.scale
    info = torch.finfo(x.q.dtype)
    least = info.tiny * info.eps  # 16-bit weights below its half are lost
    dout = torch.where((got.lse > -torch.inf).mT.unsqueeze(-1), x.upstream, 0.0)
    delta = torch.linalg.vector_norm(dout * got.out, dim=-1, dtype=torch.float64)
    lse_off = rows.lse_allowed.max()

    def of_group(per_head: Tensor) -> Tensor:  # [batch, heads, ...] to [batch, kv_heads, ...]
        return per_head.unflatten(1, (it.kv_heads, -1)).sum(2)

    def ratio(found: Tensor, want: Tensor, of_keys: Sum, of_rows: Tensor) -> Tensor:
        off = 2 * _relative(of_keys) * torch.linalg.vector_norm(found, dim=(1, 3), dtype=torch.float64)
        distance = (found.sum(1, dtype=torch.float64) - want).norm(dim=-1)
        return torch.where(distance == 0, 0.0, distance / (off + of_rows)).max()

    of_dout = of_group(torch.linalg.vector_norm(dout, dim=(1, 3), dtype=torch.float64).square()).sqrt()
    of_delta = (torch.linalg.vector_norm(x.q, dim=-1, dtype=torch.float64) * delta).square().sum(1)
    of_delta = of_group(of_delta).sqrt()
    dk = torch.zeros(it.batch, it.kv_heads, it.d, dtype=torch.float64, device=x.q.device)
    if x.dlse is not None:
        dlse = torch.where(got.lse > -torch.inf, x.dlse, 0.0)
        dk = scale * of_group(torch.einsum("bhi,bihd->bhd", dlse.double(), x.q.double()))
    dk_off = abs(scale) * (2 * lse_off + _relative(rows.out)) * of_delta + least * it.n_k * of_delta
    dv = of_group(dout.sum(1, dtype=torch.float64))
    in_step = torch.maximum(of_dout, dv.norm(dim=-1))
    return {
        "sum of dv": ratio(got.dv, dv, columns.dv, (info.eps / 2 + lse_off + least * it.n_k) * in_step),
        "sum of dk": ratio(got.dk, dk, columns.dk, dk_off),
    }


def _relative(some: Sum) -> Tensor:
    """How far, of its size, the worst of the sampled may be off."""
    size = torch.maximum(some.size, some.value.norm(dim=-1))
    return torch.where(size > 0, some.allowed / size, 0.0).max()


def sampled(configuration: Configuration) -> tuple[Tensor, Tensor]:
    """Rows and keys to judge, rising: all of them, or the first, the last, edges and others."""
    it = configuration
    if it.batch * it.heads * it.n_q * it.n_k <= SMALL:
        return torch.arange(it.n_q), torch.arange(it.n_k)
    draw = Random(f"{it.seed}/{it.index}/sampled")
    edges = sorted(set(_edges(it)))
    rows = [edge - it.offset for edge in edges if 0 <= edge - it.offset < it.n_q]
    rows += _edges_of_shards(it, it.n_q)
    keys = [edge for edge in edges if 0 <= edge < it.n_k] + _edges_of_shards(it, it.n_k)
    return _some(draw, rows, it.n_q), _some(draw, keys, it.n_k)


def _some(draw: Random, edges: list[int], n: int) -> Tensor:
    edges = sorted(set(edges))
    chosen = {0, n - 1, *draw.sample(edges, min(EDGES, len(edges))), *(draw.randrange(n) for _ in range(OTHERS))}
    return torch.tensor(sorted(chosen))


def _edges(it: Configuration) -> Iterator[int]:
    """Positions at both sides of where documents, segments, lengths and windows begin or end."""
    cuts: list[int] = [0, it.n_k, *(it.lengths or [])]
    rows = it.documents or []
    for row in rows if rows and isinstance(rows[0], list) else [rows]:
        cuts += row
    for w in it.segments or []:
        step = max(1, it.n_k // w // 50)  # of thousands of segments some are enough
        cuts += range(0, it.n_k + 1, w * step)
    for side in it.window or []:
        cuts += [side, it.n_k - side] if side > 0 else []
    rates = max(it.rates or [1])
    for cut in cuts:
        yield from (cut - 1, cut, cut + 1, cut + rates)


def _edges_of_shards(it: Configuration, n: int) -> list[int]:
    """The first and last position of everything a rank has in a row."""
    if it.ranks < 2 or it.layout == "striped":
        return []
    layout: Layout
    if it.layout == "dealt":
        layout = deal("dealt", n, it.ranks, documents=it.pattern.documents, align=it.align)
    else:
        name = "zigzag" if it.layout == "auto" else it.layout
        layout = deal(name, n, it.ranks, align=it.align)
    return [edge for shard in layout.shards for piece in shard for edge in (piece[0], piece[-1])]
