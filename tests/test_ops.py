"""The operations that graphs hold keep the promises PyTorch asks of every operation."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import longring as lr
from longring.branches import Branch
from longring.call import Options
from longring.compiled import HERE, _read, _spelled, spelled_out
from longring.geometry.head_split import HeadSplit

CAUSAL, DEFAULTS = lr.Dense(), Options()
PATTERNS = {
    "causal": CAUSAL,
    "full": lr.Dense(causal=False),
    "window": lr.Dense(causal=False, window=(3, 2)),
    "documents": lr.Dense(documents=[0, 2, 9, 13]),
    "documents by row": lr.Dense(documents=[[0, 2, 13], [0, 13]]),
    "lengths": lr.Dense(causal=False, lengths=[13, 0]),
    "dilated": lr.Dilated([4, 8, 32], [1, 2, 4]),
    "heads shared out": HeadSplit([4, 13], [1, 2]),
    "a branch of several": Branch([4], [2], phase="block", among=((4, 2), (8, 1))),
    "dilated documents": lr.Dilated([3, 13], [1, 2], causal=False, phase="block", documents=[0, 5, 13]),
}
OPTIONS = {
    "defaults": DEFAULTS,
    "by name": Options(schedule="ring", kernel="reference", scale=0.3, deterministic=True, timeout=5),
    "offset": Options(query_offset=-4),
    "sharding": Options(sharding=lr.Sharding(13), kv_sharding=lr.Sharding(13, layout="striped")),
}


def sample(pattern=CAUSAL, options=DEFAULTS, dtype=torch.float32, *, view=lambda x: x):
    """q, k, v and how to attend, as the operation takes them."""
    draw = torch.Generator().manual_seed(0)
    tensors = [view(torch.randn(2, 13, heads, 6, generator=draw).to(dtype)) for heads in (4, 2, 2)]
    return *(x.requires_grad_() for x in tensors), *spelled_out(pattern, options)


def with_tables(documents, lengths):
    """The same with tables whose numbers are read when the operation runs."""
    q, k, v, *_ = sample()
    whole, real = [], []
    text = f"(Dense(documents=documents, lengths=lengths), {_spelled(DEFAULTS, whole, real)})"
    return q, k, v, text, whole, real, documents, lengths


def of_backward(q, k, v, *call, with_dlse=True):
    """What the backward operation takes where the forward one took this."""
    out, lse = HERE.forward(*(x.detach() for x in (q, k, v)), *call)
    dlse = torch.randn_like(lse) if with_dlse else None
    return torch.randn_like(out), dlse, out, lse, *(x.detach() for x in (q, k, v)), *call


SAMPLES = {
    **{name: sample(pattern) for name, pattern in PATTERNS.items()},
    **{name: sample(options=options) for name, options in OPTIONS.items()},
    "float64": sample(dtype=torch.float64),
    "bfloat16": sample(dtype=torch.bfloat16),
    "tables": with_tables(torch.tensor([0, 4, 13]), torch.tensor([13, 7])),
    "strided": sample(view=lambda x: x[..., ::2]),
    "heads first": sample(view=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "nothing to differentiate": tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in sample()),
}


@pytest.mark.parametrize("args", SAMPLES.values(), ids=SAMPLES)
def test_attention(args):
    assert set(opcheck(HERE.forward, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("args", SAMPLES.values(), ids=SAMPLES)
def test_its_backward(args):
    assert set(opcheck(HERE.backward, of_backward(*args)).values()) == {"SUCCESS"}


def test_its_backward_without_a_gradient_of_lse():
    assert set(opcheck(HERE.backward, of_backward(*sample(), with_dlse=False)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_is_spelled_out_is_read_alike(pattern, options):
    text, whole, real, *tables = spelled_out(pattern, options)
    assert not any(digit in text for digit in "0123456789")
    assert tables == [None, None]
    same, read = _read(text, tuple(whole), tuple(real), None, None)
    assert same == pattern
    assert read._replace(sharding=None, kv_sharding=None) == options._replace(sharding=None, kv_sharding=None)
    assert (read.sharding is None) == (options.sharding is None)


def test_text_with_quotes_and_names_survives():
    options = Options(kernel="""it's "i" and r %d {}""")
    text, whole, real, *_ = spelled_out(lr.Dense(), options)
    assert _read(text, tuple(whole), tuple(real), None, None)[1] == options


def test_the_second_derivative_is_refused():
    args = sample()
    out, _ = HERE.forward(*args)
    (dq,) = torch.autograd.grad(out.sum(), args[0], create_graph=True)
    with pytest.raises(lr.NotBuilt, match="second derivative"):
        dq.sum().backward()
