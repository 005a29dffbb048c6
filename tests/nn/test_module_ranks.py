"""Every module by its definition, and over ranks as in one process: outputs and the gradient of every parameter."""

from __future__ import annotations

import pytest
import torch

import longring as lr
from defined_modules import layer, multihead
from longring.nn import DecoderLayer, EncoderLayer
from longring.testing import run_ranks
from module_cases import CASES, alone, check_same, found, inputs, made, on_this_rank, together

NAMES = list(CASES)


def defined(case):
    module, (given, dout) = made(case), inputs(case)
    given = [x.requires_grad_() for x in given]
    if isinstance(module, EncoderLayer | DecoderLayer):
        out = layer(module, *given, pattern=case.pattern, memory_pattern=case.memory_pattern)
    else:
        out = multihead(module, *given, pattern=case.pattern)
    return found(module, out, given, dout)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_definition(name):
    check_same(alone(CASES[name]), defined(CASES[name]), name)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_in_processes_are_as_one(ranks):
    found_by_ranks = lr.launch(on_this_rank, NAMES, ranks=ranks, timeout=100)
    for number, name in enumerate(NAMES):
        check_same(together(CASES[name], [parts[number] for parts in found_by_ranks]), alone(CASES[name]), name)


def test_more_ranks_than_tokens():
    """Some ranks hold nothing: their gradients are zeros, and nobody waits for them in vain."""
    names = ["torch's", "dilated", "decoder with memory"]
    found_by_ranks = run_ranks(27, lambda group: on_this_rank(names, group))
    for number, name in enumerate(names):
        check_same(together(CASES[name], [parts[number] for parts in found_by_ranks]), alone(CASES[name]), name)


def test_layouts_and_schedules_are_not_the_modules_business():
    case = CASES["window"]
    want = alone(case)
    module, (given, _) = made(case), inputs(case)

    def program(group, layout, schedule):
        s = lr.Sharding(given[0].shape[1], group, layout)
        own = made(case)
        own.attention.schedule = schedule
        return s.unshard(own(s.shard(given[0]), sharding=s)[0]).detach()

    for layout, schedule in (("contiguous", "exchange"), ("striped", "gather"), ("zigzag", "ulysses")):
        for out in run_ranks(3, lambda group, a=layout, b=schedule: program(group, a, b)):
            torch.testing.assert_close(out, want.out)
    torch.testing.assert_close(module(given[0])[0].detach(), want.out)
