"""Real processes over Gloo: every schedule, layout and pattern against the definition, and bit for bit as simulated."""

from dataclasses import replace

import pytest
import torch

import longring as lr
from attending import PATTERNS, attend, attend_on_a_mesh, every_case, inputs, simulated, whole
from longring.testing import judge

pytestmark = pytest.mark.processes

BOTH = (torch.float32, torch.bfloat16)


def check(cases, parts_of_ranks):
    """Within the budget of the definition, and in float32 and bfloat16 alike the very bits of `simulate`."""
    for number, case in enumerate(cases):
        got = whole(case, [parts[number] for parts in parts_of_ranks])
        q, k, v, dout, dlse = inputs(case.dtype)
        for verdict in judge(got, q, k, v, PATTERNS[case.pattern], dout, dlse):
            assert verdict.ok, (case.name, verdict)
        want = simulated(case, len(parts_of_ranks))
        for name, ours, theirs in zip(got._fields, got, want, strict=True):
            assert torch.equal(ours, theirs), (case.name, name)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_schedule_layout_and_pattern(ranks):
    cases = every_case((torch.float32,))
    check(cases, lr.launch(attend, cases, ranks=ranks, timeout=110))


@pytest.mark.parametrize(("ranks", "every"), [(1, 7), (5, 9), (8, 13)])
def test_more_ranks_and_bfloat16(ranks, every):
    """A part of all cases, in `make soak` all of them."""
    cases = every_case(BOTH)[::every]
    check(cases, lr.launch(attend, cases, ranks=ranks, timeout=110))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_everything_on_any_number_of_ranks(ranks):
    cases = every_case(BOTH)
    check(cases, lr.launch(attend, cases, ranks=ranks, timeout=1400))


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (1, 4), (4, 1)])
def test_nodes_of_a_mesh(shape):
    """The inner dimension of a mesh is a node, within which heads change places and inner rings go round."""
    cases = [
        replace(case, node_ranks=shape[1])
        for case in every_case((torch.float32,))
        if case.schedule in ("hybrid", "double_ring")
    ]
    ranks = shape[0] * shape[1]
    check(cases[::2], lr.launch(attend_on_a_mesh, cases[::2], shape, ranks=ranks, timeout=110))
