"""Rotary and xPos embeddings against complex numbers in float64, near zero and near a million."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import longring as lr
from defined_modules import turned
from longring.nn import Rotary, XPos
from longring.testing import relative_error

D, MILLION = 16, 1 << 20
LAYOUTS = ("half", "interleaved")


def drawn(n=9, batch=2, heads=3, d=D, dtype=torch.float64, seed=0):
    return torch.randn(batch, n, heads, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def xpos_words(xpos):
    return {"centre": xpos.length / 2, "scale_base": xpos.scale_base, "base": xpos.base, "layout": xpos.layout}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", [0, MILLION - 9])
def test_rotary_is_a_turn_of_complex_numbers(layout, dtype, first):
    x = drawn(dtype=dtype)
    for positions in (torch.arange(first, first + 9), torch.stack([torch.arange(first, first + 9)] * 2) - 3):
        for base in (10000.0, 500000.0):
            got = Rotary(D, base=base, layout=layout)(x, positions)
            assert got.dtype == dtype
            want = turned(x, positions, base=base, layout=layout)
            assert relative_error(got, want) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_xpos_is_a_turn_and_a_fading(layout, dtype):
    xpos, x, positions = XPos(D, length=1000, layout=layout), drawn(dtype=dtype), torch.arange(0, 900, 100)
    for keys in (False, True):
        want = turned(x, positions, **xpos_words(xpos), keys=keys)
        assert relative_error(xpos(x, positions, keys=keys), want) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_depend_on_differences_alone(layout):
    q, k = drawn(n=1), drawn(n=1, seed=1)
    for embedding in (Rotary(D, layout=layout), XPos(D, length=MILLION, layout=layout)):
        for i, j in ((5, 5), (900, 3), (70_000, 69_000)):
            scores = [
                (embedding(q, torch.tensor([i + far])) * embedding(k, torch.tensor([j + far]), keys=True)).sum(-1)
                for far in (0, 17, MILLION - 70_001)
            ]
            for score in scores[1:]:
                torch.testing.assert_close(score, scores[0], rtol=1e-8, atol=1e-8)


def test_xpos_fades_with_distance():
    ones, xpos = torch.ones(1, 1, 1, D, dtype=torch.float64), XPos(D, length=4096)
    scores = [
        float((xpos(ones, torch.tensor([3000])) * xpos(ones, torch.tensor([j]), keys=True)).sum()) for j in (3000,)
    ]
    assert scores[0] == pytest.approx(D)
    first = [ones[..., :1] * (0.4 / 1.4) ** (far / 512) for far in (0, 512, 1024)]
    assert [float(x) for x in first] == pytest.approx([1, 0.4 / 1.4, (0.4 / 1.4) ** 2])
    for far in (512, 1024):
        q = xpos.at(torch.tensor([3000])).scale[..., 0]
        k = 1 / xpos.at(torch.tensor([3000 - far])).scale[..., 0]
        assert float(q * k) == pytest.approx((0.4 / 1.4) ** (far / 512), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_xpos_at_a_million_stays_finite(dtype):
    """Its numbers, and the scores of any pair, the forbidden ones of late keys for early queries among them."""
    xpos, x = XPos(64, length=MILLION), 8 * drawn(n=4, d=64, dtype=dtype)
    assert xpos.scale_base == pytest.approx(MILLION / 2 * -math.log(0.4 / 1.4) / 40)
    positions = torch.tensor([0, 1, MILLION // 2, MILLION - 1])
    q, k = xpos(x, positions), xpos(x, positions, keys=True)
    assert q.isfinite().all()
    assert k.isfinite().all()
    assert torch.einsum("bihd,bjhd->bhij", q.float(), k.float()).isfinite().all()
    want = turned(x, positions, **xpos_words(xpos), keys=True)
    for at in range(4):
        assert relative_error(k[:, at], want[:, at]) <= 4 * torch.finfo(dtype).eps


def test_xpos_says_what_does_not_fit():
    assert XPos(D, length=32_000).scale_base == 512
    with pytest.raises(lr.ArgumentError, match=r"512 fades too fast for 1,048,576 tokens .* scale_base >= 16421"):
        XPos(D, length=MILLION, scale_base=512)
    assert XPos(D, length=MILLION, scale_base=16421).scale_base == 16421
    xpos = XPos(D, length=32_000)
    with pytest.raises(lr.ArgumentError, match="float16"):
        xpos(drawn(dtype=torch.float16), torch.arange(9))
    with pytest.raises(lr.ArgumentError, match="positions are 31995 to 32003, but xPos was made for length 32000"):
        xpos(drawn(), torch.arange(31_995, 32_004))


def test_angles_serve_many_layers():
    x, positions = drawn(dtype=torch.float32), torch.arange(9)
    for embedding in (Rotary(D), XPos(D, length=9)):
        angles = embedding.at(positions)
        for keys in (False, True):
            assert torch.equal(embedding(x, angles, keys=keys), embedding(x, positions, keys=keys))
        with pytest.raises(
            lr.ArgumentError, match=r"angles are torch.float32, but for x in torch.float64 they must be"
        ):
            embedding(x.double(), angles)


def test_gradients():
    for embedding in (Rotary(D), Rotary(D, layout="interleaved"), XPos(D, length=9, scale_base=4)):
        for keys in (False, True):
            x = drawn(n=3, batch=1, heads=1).requires_grad_()
            assert torch.autograd.gradcheck(lambda x, e=embedding, k=keys: e(x, torch.arange(3), keys=k), (x,))


def test_nothing_is_lost_by_a_conversion_or_a_stay_on_the_meta_device():
    x, positions = drawn(dtype=torch.bfloat16), torch.arange(MILLION - 9, MILLION)
    for embedding in (Rotary(D), XPos(D, length=MILLION)):
        want = embedding(x, positions)
        moved = copy.deepcopy(embedding).to(torch.bfloat16).to("meta").to_empty(device="cpu")
        assert torch.equal(moved(x, positions), want)
        assert not embedding.state_dict()


def test_no_tokens_at_all():
    assert Rotary(D)(drawn(n=0), torch.arange(0)).shape == (2, 0, 3, D)
    assert XPos(D, length=5)(drawn(n=0), torch.arange(0)).shape == (2, 0, 3, D)


def test_refusals():
    for head_dim in (0, 3, True, 8.0):
        with pytest.raises(lr.ArgumentError, match="head_dim"):
            Rotary(head_dim)
    with pytest.raises(lr.ArgumentError, match="layout"):
        Rotary(D, layout="neox")
    with pytest.raises(lr.ArgumentError, match="base"):
        Rotary(D, base=0)
    with pytest.raises(lr.ArgumentError, match="length"):
        XPos(D, length=0)
    with pytest.raises(lr.ArgumentError, match="scale_base"):
        XPos(D, length=5, scale_base=-1)
    with pytest.raises(lr.ArgumentError, match="1 rows and 8 tokens"):
        Rotary(D)(drawn(), torch.arange(8))
    with pytest.raises(lr.ArgumentError, match="3 rows and 9 tokens"):
        Rotary(D)(drawn(), torch.zeros(3, 9))
    with pytest.raises(lr.ArgumentError, match=r"shape \[n\] or \[batch, n\]"):
        Rotary(D)(drawn(), torch.zeros(1, 1, 9))
    with pytest.raises(lr.ArgumentError, match="heads, 8"):
        Rotary(8)(drawn(), torch.arange(9))
    assert repr(XPos(D, length=9)) == "XPos(16, base=10000, layout='interleaved', length=9, scale_base=512)"
