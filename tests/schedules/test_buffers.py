"""Buffers are made once and used again, and nothing is given away while somebody uses it."""

import gc

import pytest
import torch

import longring as lr
from longring.schedules.buffers import Buffers, Loan, buffers_of
from longring.testing import run_ranks

CPU = torch.device("cpu")


def test_a_buffer_is_used_again_and_a_larger_one_replaces_it():
    buffers = Buffers()
    small = buffers.take(10, torch.float32, CPU)
    buffers.give_back(small)
    assert buffers.take(8, torch.float32, CPU) is small
    assert buffers.take(8, torch.float64, CPU) is not small
    buffers.give_back(small)
    large = buffers.take(11, torch.float32, CPU)
    buffers.give_back(large)
    assert buffers.take(1, torch.float32, CPU) is large  # the small one is gone


def test_the_smallest_that_fits_is_taken():
    buffers = Buffers()
    large, small = buffers.take(100, torch.float32, CPU), buffers.take(10, torch.float32, CPU)
    buffers.give_back(large)
    buffers.give_back(small)
    assert buffers.take(9, torch.float32, CPU) is small


def test_a_loan_goes_back_when_all_are_done():
    buffers = Buffers()
    loan = Loan(buffers, 10, torch.float32, CPU)
    memory = loan.flat.data_ptr()
    loan.shared()
    loan.done()
    assert buffers.take(10, torch.float32, CPU).data_ptr() != memory
    loan.done()
    assert buffers.take(10, torch.float32, CPU).data_ptr() == memory


@pytest.mark.parametrize("schedule", ["ring", "bidirectional", "double_ring", "exchange"])
def test_a_second_call_makes_no_buffer_and_all_come_back(schedule):
    def program(group):
        def call():
            q, k, v = (torch.randn(1, 12, 2, 8, requires_grad=True) for _ in range(3))
            pattern = lr.Dense(causal=False)
            out = lr.attention(q, k, v, pattern=pattern, group=group, layout="contiguous", schedule=schedule)
            out.sum().backward()
            free = buffers_of(group)._free
            return sorted(buffer.data_ptr() for some in free.values() for buffer in some)

        return call(), call(), call()

    for first, second, third in run_ranks(4, program, node_ranks=2):
        assert len(first) == len(set(first)) > 0
        assert first == second == third


def test_release_buffers_frees_them():
    def program(group):
        x = torch.randn(1, 6, 1, 4)
        lr.attention(x, x, x, group=group, layout="contiguous", pattern=lr.Dense(causal=False), schedule="ring")
        return group

    groups = run_ranks(2, program)
    assert any(buffers_of(group)._free for group in groups)
    lr.release_buffers()
    assert not any(buffers_of(group)._free for group in groups)


def test_buffers_go_with_their_rank():
    from longring.schedules import buffers

    x = torch.randn(1, 12, 1, 4)
    lr.simulate(x, x, x, ranks=3, schedule="ring")
    gc.collect()
    before = len(buffers._of_ranks)
    lr.simulate(x, x, x, ranks=3, schedule="ring")
    gc.collect()
    assert len(buffers._of_ranks) == before
