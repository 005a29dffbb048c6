"""PyTorch's own flash attention for a GPU, for whose operations plain ones stand in: what it is told, and its traps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import longring as lr
from attending import tensors
from choices import forget_choices
from longring.kernels import fused, totals
from longring.kernels.operations import cuda, sequences
from longring.kernels.operations.contract import Rows, with_columns_for_dlse
from longring.testing import Result, judge
from longring.testing.budgets import relative_error
from longring.testing.oracle import oracle

triton = pytest.importorskip("triton", reason="needs the package triton")
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs Triton's interpreter")

N = 45
PATTERNS = {
    "causal": lr.Dense(),
    "full": lr.Dense(causal=False),
    "left window": lr.Dense(window=(7, 0)),
    "both sides": lr.Dense(causal=False, window=(9, 4)),
    "to the right": lr.Dense(causal=False, window=(0, 11)),
    "without a limit": lr.Dense(causal=False, window=(None, 3)),
    "documents": lr.Dense(documents=[0, 7, 8, 30, N]),
    "windows in documents": lr.Dense(window=(7, 0), documents=[0, 3, 4, 30, N]),
    "dilated": lr.Dilated([8, 16, N], [1, 2, 4]),
}


class Aten:
    """The operations that are used, with their arguments in their order."""

    def __init__(self, plain) -> None:
        self.plain, self.called = plain, []

    def _scaled_dot_product_flash_attention(self, q, k, v, dropout_p, is_causal, return_debug_mask, *, scale):
        assert (dropout_p, return_debug_mask) == (0.0, False)
        out, lse = self.plain.forward(*_swapped(q, k, v), scale, is_causal)
        self.called.append("one")
        return out.transpose(1, 2), lse, None, None

    def _scaled_dot_product_flash_attention_backward(
        self, dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale
    ):
        assert (cum_q, cum_k, max_q, max_k, dropout_p) == (None, None, q.shape[2], k.shape[2], 0.0)
        self.called.append("one, backward")
        return _swapped(*self.plain.backward(*_swapped(dout, q, k, v, out), lse, scale, is_causal, False))

    def _flash_attention_forward(
        self,
        q,
        k,
        v,
        cum_q,
        cum_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        *,
        scale,
        window_size_left,
        window_size_right,
    ):
        assert (dropout_p, return_debug_mask) == (0.0, False)
        pieces, window = self._told(q, k, cum_q, cum_k, max_q, max_k, window_size_left, window_size_right)
        self.called.append("many")
        return *self.plain.forward_of(pieces, q, k, v, scale, is_causal, window), None, None, None

    def _flash_attention_backward(
        self,
        dout,
        q,
        k,
        v,
        out,
        lse,
        cum_q,
        cum_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        rng_state,
        unused,
        *,
        scale,
        window_size_left,
        window_size_right,
    ):
        assert dropout_p == 0.0
        pieces, window = self._told(q, k, cum_q, cum_k, max_q, max_k, window_size_left, window_size_right)
        self.called.append("many, backward")
        return self.plain.backward_of(pieces, dout, q, k, v, out, lse, scale, is_causal, False, window)

    def _told(self, q, k, cum_q, cum_k, max_q, max_k, left, right):
        window = self.plain.window(*self.plain.as_flash_attn_2_takes_it(left, right, max_k))
        if cum_q is None:
            assert (max_q, max_k) == (q.shape[1], k.shape[1])
            return self.plain.pieces(None, None, None, None, window), window
        return self.plain.pieces(cum_q, cum_k, max_q, max_k, window), window


def _swapped(*tensors):
    return [x.transpose(1, 2) for x in tensors]


@pytest.fixture
def called(monkeypatch):
    """Names of what was called, where parts wait for each other as on a GPU."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))
    import plain

    aten = Aten(plain)
    monkeypatch.setattr(cuda, "_aten", aten)
    monkeypatch.setattr(cuda, "not_for", lambda *_, **__: None)
    for module in (totals, fused):
        monkeypatch.setattr(module, "is_lazy", lambda _: True)
    forget_choices()
    yield aten.called
    forget_choices()
    sys.modules.pop("plain", None)


def check(pattern, outputs, given, q, k, v, dout, dlse=None):
    out, lse = outputs
    grads = torch.autograd.grad(outputs if dlse is not None else out, (q, k, v), given)
    verdicts = judge(Result(out, lse, *grads), q, k, v, pattern, dout, dlse)
    assert all(verdict.ok for verdict in verdicts), verdicts


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("d", [16, 20])
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern(called, name, kv_heads, d):
    q, k, v, dout, dlse = tensors(2, N, N, 4, kv_heads, d, torch.bfloat16)
    for slope in (None, dlse):
        outputs = lr.attention(q, k, v, pattern=PATTERNS[name], kernel="flash", return_lse=True)
        check(PATTERNS[name], outputs, dout if slope is None else (dout, slope), q, k, v, dout, slope)
    if "window" in name or "documents" in name:
        assert called[:2] == ["many", "many, backward"]
        assert called[2] == "many"
        assert set(called[3:]) == {"one, backward"}  # a gradient of lse is told in columns, stack by stack


@pytest.mark.parametrize("schedule", ["ring", "exchange", "gather"])
@pytest.mark.parametrize("name", PATTERNS)
def test_over_ranks(called, name, schedule):
    q, k, v, dout, _ = tensors(1, N, N, 4, 2, 16, torch.bfloat16)
    for layout in ("contiguous", "zigzag"):
        options = {"ranks": 3, "kernel": "flash", "schedule": schedule, "layout": layout}
        sim = lr.simulate(q, k, v, pattern=PATTERNS[name], **options)
        check(PATTERNS[name], (sim.out, sim.lse), dout, q, k, v, dout)


@pytest.mark.parametrize("n_q", [1, 9, 44])
@pytest.mark.parametrize("name", ["causal", "left window", "both sides", "without a limit"])
def test_fewer_queries_than_keys(called, name, n_q):
    q, k, v, dout, _ = tensors(1, n_q, N, 4, 2, 16, torch.bfloat16)
    outputs = lr.attention(q, k, v, pattern=PATTERNS[name], kernel="flash", return_lse=True)
    check(PATTERNS[name], outputs, dout, q, k, v, dout)


@pytest.mark.parametrize("offset", [0, 3, 20])
@pytest.mark.parametrize("name", ["causal", "left window", "both sides", "without a limit"])
def test_more_queries_than_keys(called, name, offset):
    """Where a limit to the right may be as large as there are keys, and hides some of them yet."""
    q, k, v, dout, _ = tensors(1, N, 20, 4, 2, 16, torch.bfloat16)
    outputs = lr.attention(q, k, v, pattern=PATTERNS[name], kernel="flash", return_lse=True, query_offset=offset - 20)
    grads = torch.autograd.grad(outputs[0], (q, k, v), dout)
    got = Result(*outputs, *grads)
    verdicts = judge(got, q, k, v, PATTERNS[name], dout, query_offset=offset - 20)
    assert all(verdict.ok for verdict in verdicts), verdicts


# ------------------------------------------------------------------------------- far batch rows, large gradients


def test_how_far_batch_rows_may_be_apart():
    def far(many, heads, rows, d):
        return sequences.has_far_batch_rows(torch.empty(many, heads, rows, d, device="meta"))

    assert far(2, 16, 1 << 20, 128)
    assert far(2, 16, (1 << 20) - 1, 127)  # it rounds up
    assert not far(1, 16, 1 << 20, 128)
    assert not far(2, 16, (1 << 20) - 128, 128)


@pytest.mark.parametrize("name", ["causal", "full", "left window", "dilated"])
def test_far_batch_rows_go_one_by_one(called, monkeypatch, name):
    for module in (cuda, sequences):
        monkeypatch.setattr(module, "has_far_batch_rows", lambda q: q.shape[0] > 1)
    q, k, v, dout, dlse = tensors(3, N, N, 4, 2, 16, torch.bfloat16)
    for slope in (None, dlse):
        called.clear()
        outputs = lr.attention(q, k, v, pattern=PATTERNS[name], kernel="flash", return_lse=True)
        check(PATTERNS[name], outputs, dout if slope is None else (dout, slope), q, k, v, dout, slope)
        assert sum("backward" in one for one in called) >= 3


@pytest.mark.parametrize("size", [0.01, 1.0, 30000.0])
def test_gradients_of_lse_of_any_size_in_float16(called, size):
    """A loss that is scaled for float16 has them beyond what float16 can say."""
    q, k, v, dout, dlse = tensors(1, N, N, 4, 2, 16, torch.float16)
    _, lse = lr.attention(q, k, v, kernel="flash", return_lse=True)
    got = torch.autograd.grad(lse, (q, k), size * dlse)
    want = oracle(q, k, v, lr.Dense(), 0 * dout, size * dlse)
    assert max(map(relative_error, got, (want.dq, want.dk))) < 4 * torch.finfo(torch.float16).eps


def test_a_nan_in_the_gradient_of_lse_reaches_its_own_row_alone():
    dlse = torch.full((1, 2, 5), 3e4)
    dlse[0, 0, 3] = torch.nan
    q, k, v, dout, out = torch.zeros(5, 1, 2, 5, 8, dtype=torch.float16)
    rows, *_ = with_columns_for_dlse(Rows(dout, out, torch.zeros(1, 2, 5), dlse), q, k, v, 8)
    assert (rows.dout * rows.out).sum(-1).isnan().nonzero().tolist() == [[0, 0, 3]]


# --------------------------------------------------------------------------------- what is behind PyTorch's flash


def test_flash_attn_4_behind_it_is_refused_and_noticed(called, monkeypatch):
    q, k, v, *_ = tensors(1, N, N, 4, 2, 16, torch.bfloat16)
    lr.attention(q, k, v, kernel="sdpa")
    taken = len(called)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    with pytest.raises(lr.KernelRefusal, match="activate_flash_attention_impl"):
        lr.attention(q, k, v, kernel="flash")
    lr.attention(q, k, v, kernel="sdpa")
    assert len(called) == taken
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    lr.attention(q, k, v, kernel="flash")
    assert len(called) > taken
