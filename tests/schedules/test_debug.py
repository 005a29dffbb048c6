"""LONGRING_DEBUG=1 names the rank, the step and the tile in which the first nan or inf arose."""

import pytest
import torch

import longring as lr
from longring.testing import run_ranks

every_kernel = pytest.mark.parametrize("kernel", ["sdpa", "reference"])


@pytest.fixture(autouse=True)
def _debugging(monkeypatch):
    monkeypatch.setenv("LONGRING_DEBUG", "1")


def tensors(n=24):
    torch.manual_seed(0)
    return [torch.randn(1, n, 2, 8, requires_grad=True) for _ in range(3)]


@every_kernel
def test_a_nan_in_a_key_is_named_by_the_rank_that_meets_it_first(kernel):
    q, k, v = tensors()
    with torch.no_grad():
        k[0, 9, 1, 3] = torch.nan  # on rank 1 of 3 that hold eight rows each: its local row 1

    def program(group):
        s = lr.Sharding(24, group, "contiguous")
        return lr.ring_attention(*(s.shard(x) for x in (q, k, v)), sharding=s, kernel=kernel)

    with pytest.raises(lr.NotFinite, match=r"rank \d of 3, ring, forward, .* local rows .*already in k \(row 1"):
        run_ranks(3, program)


@every_kernel
@pytest.mark.parametrize("schedule", ["ring", "exchange", "gather", "ulysses"])
def test_an_infinite_gradient_is_named_in_the_backward(kernel, schedule):
    q, k, v = tensors()
    sim = lr.simulate(q, k, v, ranks=2, schedule=schedule, kernel=kernel)
    dout = torch.ones_like(sim.out)
    dout[0, 20] = torch.inf
    with pytest.raises(lr.NotFinite, match=rf"rank \d of 2, {schedule}, backward.*already in the gradient of out"):
        sim.out.backward(dout)


@every_kernel
def test_overflow_of_finite_inputs_is_named_as_such(kernel):
    q, k, v = tensors()
    with pytest.raises(lr.NotFinite, match=r"rank 0 of 1, .* although all that went into it is finite"):
        lr.attention(q * 1e30, k * 1e30, v, kernel=kernel)


def test_what_is_finite_passes_and_is_the_same():
    q, k, v = tensors()
    pattern = lr.Dilated([8, 16], [1, 2])
    looked_at = lr.simulate(q, k, v, ranks=3, pattern=pattern)
    looked_at.out.sum().backward()
    gradient = q.grad.clone()
    q.grad = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGRING_DEBUG", "0")
        plain = lr.simulate(q, k, v, ranks=3, pattern=pattern)
        plain.out.sum().backward()
    assert torch.allclose(looked_at.out, plain.out)
    assert torch.allclose(gradient, q.grad, atol=1e-6)


def test_rows_that_see_nothing_are_not_taken_for_overflow():
    q, k, v = tensors()
    out, lse = lr.attention(q, k, v, pattern=lr.Dense(window=(2, 0), lengths=[10]), return_lse=True)
    assert (lse[:, :, 13:] == -torch.inf).all()
    out.sum().backward()


@every_kernel
def test_the_row_is_numbered_in_the_tensor_and_not_in_the_tile(kernel):
    """Row 20 of the second document, whose tile begins at 16."""
    q, k, v = tensors()
    with torch.no_grad():
        k[0, 20, 1, 3] = torch.nan
    with pytest.raises(lr.NotFinite, match=r"already in k \(row 20 here\)"):
        lr.attention(q, k, v, pattern=lr.Dense(documents=[0, 16, 24]), kernel=kernel)


@every_kernel
def test_a_gradient_of_the_values_alone_that_overflows_is_named(kernel):
    """Values of 0 leave dq and dk at 0, and the first key's weights add up to more than 1."""
    q, k, v = tensors()
    with torch.no_grad():
        q.zero_()
        v.zero_()
    out = lr.attention(q, k, v, kernel=kernel)
    with pytest.raises(lr.NotFinite, match=r"backward.* nan or inf in dq, dk or dv .*finite"):
        out.backward(torch.full_like(out, 3e38))


@pytest.mark.parametrize("value", ["", "0"])
def test_without_it_nothing_is_looked_at(monkeypatch, value):
    monkeypatch.setenv("LONGRING_DEBUG", value)
    q, k, v = tensors()
    with torch.no_grad():
        k[0, 9] = torch.nan
    assert lr.attention(q, k, v, kernel="reference").isnan().any()
