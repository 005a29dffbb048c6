"""compat="torchscale" against numbers that LongNet's released module gave; golden/torchscale_cases.json says how."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

import longring as lr
from longring.branches import released_branches
from longring.call import _warn_of_rows_left_out
from longring.geometry.patterns import Problem
from longring.testing import Result, relative_error, run_ranks
from longring.testing.budgets import distance
from mixing import Ask, allowed, answer, answers, released, together, zero_keys

GOLDEN = Path(__file__).parent / "golden"
RECORD = json.loads((GOLDEN / "torchscale_cases.json").read_text())
CASES = {case["name"]: case for case in RECORD["cases"]}
QUANTITIES = ("out", "dq", "dk", "dv")
COMPAT = {"compat": "torchscale"}


def drawn(case) -> list[torch.Tensor]:
    """q, k, v and dout in 64ths, which every dtype holds: all dtypes are asked the very same."""
    draw = torch.Generator().manual_seed(case["seed"])
    shape = (4, case["batch"], case["n"], case["heads"], case["d"])
    x = torch.randint(-127, 128, shape, generator=draw).double() / 64
    if case.get("far_below"):  # scores below -40, beside which a zero key is everything
        x[0], x[1] = -4 * x[0].abs() - 6, x[1].abs() + 4
    x[0][:, case.get("zero_queries", [])] = 0
    return list(x.unbind(0))


def digest(x: torch.Tensor) -> torch.Tensor:
    """One number a row, [batch, n, heads]: the record is small, and no row goes unasked."""
    return x.double() @ torch.arange(1, x.shape[-1] + 1).double()


def ask_for(case, dtype=torch.float64, **words) -> Ask:
    options = {"segment_lengths": case["segments"], "dilation_rates": case["rates"], "causal": case["causal"], **COMPAT}
    tensors = tuple(x.to(dtype) for x in drawn(case))
    sizes = {"n": case["n"], "heads": case["heads"], "kv_heads": case["heads"], "batch": case["batch"]}
    return Ask(options, **sizes, dtype=dtype, with_lse=False, tensors=tensors, **words)


def golden(case) -> dict[str, torch.Tensor]:
    with numpy.load(GOLDEN / "torchscale_values.npz", allow_pickle=False) as values:
        return {name: torch.from_numpy(values[f"{case['name']} {name}"]) for name in QUANTITIES}


def check(got: Result, ask: Ask, case) -> None:
    """Each number within what rounding alone explains, by the definition in the same dtype."""
    q, k, v, dout = ask.whole()
    budget = allowed(released, q, k, v, ask.pattern, dout, of=lambda x: digest(x) if x.ndim == 4 else x)
    for name, want in golden(case).items():
        error, most = distance(digest(getattr(got, name)), want), getattr(budget, name)
        assert error <= most, (case["name"], name, error, most)


def test_the_record():
    assert RECORD["commit"] == "4d1e0e82e5adf86dd424f1463192635b73fc8efc"
    assert sum(case["causal"] for case in CASES.values()) >= 10
    assert sum(not case["causal"] for case in CASES.values()) >= 10
    assert {12, 16} <= {case["heads"] for case in CASES.values()}
    assert {1, 2, 3, 4, 8, 16} <= {rate for case in CASES.values() for rate in case["rates"]}


@pytest.mark.parametrize("name", CASES)
def test_the_definition_is_what_the_module_gave(name):
    """The definition in these tests, by which budgets are derived."""
    ask = ask_for(CASES[name])
    q, k, v, dout = ask.whole()
    check(released(q, k, v, ask.pattern, dout), ask, CASES[name])


@pytest.mark.filterwarnings("ignore::longring.RowsLeftOut")
@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_the_module_gave(name):
    case = CASES[name]
    for kernel in ("sdpa", "reference"):
        ask = ask_for(case, kernel=kernel)
        check(answer(ask), ask, case)


@pytest.mark.filterwarnings("ignore::longring.RowsLeftOut")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.get("far_below")])
def test_and_in_less_precision(name, dtype):
    ask = ask_for(CASES[name], dtype)
    check(answer(ask), ask, CASES[name])


# ------------------------------------------------------------------------------------- what is odd about the code


def test_zero_keys_are_counted_only_where_something_is_padded():
    """Where nothing is, compat is what mixing_gradient=False is; where something is, it is not."""
    whole = {"segment_lengths": [8, 16], "dilation_rates": [1, 2], "causal": False}
    for n, is_same in ((32, True), (31, False)):
        compat = answer(Ask({**whole, **COMPAT}, n=n, kv_heads=6, with_lse=False))
        without = answer(Ask({**whole, "phase": "block", "mixing_gradient": False}, n=n, kv_heads=6, with_lse=False))
        errors = [relative_error(getattr(compat, name), getattr(without, name)) for name in QUANTITIES]
        assert max(errors) < 1e-14 if is_same else min(errors) > 1e-3, (n, errors)


def test_causal_rows_meet_no_zero_key():
    words = {"segment_lengths": [8, 20], "dilation_rates": [1, 4]}
    compat = answer(Ask({**words, **COMPAT}, kv_heads=6, with_lse=False))
    without = answer(Ask({**words, "phase": "block", "mixing_gradient": False}, kv_heads=6, with_lse=False))
    assert all(relative_error(ours, theirs) < 1e-14 for ours, theirs in zip(compat, without, strict=True))


def test_an_lse_of_zero_is_taken_for_no_key():
    """A query of zeros that sees one key in one branch and two in another is answered by the other alone."""
    q, k, v = torch.randn(3, 1, 4, 1, 4, dtype=torch.float64).unbind(0)
    q[:, 1] = 0
    out = lr.dilated_attention(q, k, v, segment_lengths=[1, 4], dilation_rates=[1, 1], **COMPAT)
    torch.testing.assert_close(out[0, 1], v[0, :2].mean(0))


def test_a_branch_that_only_a_zero_key_answers_is_taken_for_none():
    """A score of -40 beside one zero key leaves an lse of exactly 0."""
    case = next(case for case in CASES.values() if case.get("far_below"))
    assert (zero_keys(case["segments"][0], case["rates"][0], case["n"], case["heads"]) == 1).any()
    ask = ask_for(case, torch.float32)
    check(answer(ask), ask, case)


def test_gradients_are_finite_where_nobody_sees_anything():
    ask = Ask({"segment_lengths": [8], "dilation_rates": [7], "causal": False, **COMPAT}, n=8, kv_heads=6)
    _warn_of_rows_left_out.cache_clear()  # it warns once
    with pytest.warns(lr.RowsLeftOut, match=r"\[7\]"):
        got = answer(replace(ask, with_lse=False))
    assert (got.out == 0).any()
    assert all(x.isfinite().all() for x in (got.out, got.dq, got.dk, got.dv))


# ---------------------------------------------------------------------------------------------------- over ranks

SOME = [name for number, name in enumerate(CASES) if number % 4 == 0]


@pytest.mark.filterwarnings("ignore::longring.RowsLeftOut")
@pytest.mark.parametrize("name", SOME)
def test_ranks_give_what_the_module_gave(name):
    case = CASES[name]
    for ranks, layout, schedule in (
        (2, "contiguous", "exchange"),
        (3, "zigzag", "ring"),
        (4, "striped", "ulysses"),
        (5, "zigzag", "auto"),
    ):
        ask = ask_for(case, layout=layout, schedule=schedule)
        parts = run_ranks(ranks, lambda group, ask=ask: answer(ask, group))
        check(together(ask, parts), ask, case)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::longring.RowsLeftOut")
def test_processes_give_what_the_module_gave():
    asks = [ask_for(CASES[name], layout=layout) for name in SOME for layout in ("contiguous", "zigzag")]
    parts = lr.launch(answers, asks, ranks=3, timeout=100)
    for number, ask in enumerate(asks):
        check(together(ask, [part[number] for part in parts]), ask, CASES[SOME[number // 2]])


def test_a_group_with_its_layout():
    options = {"segment_lengths": [8, 16], "dilation_rates": [1, 2], "causal": False, **COMPAT}
    ask = Ask(options, n=42, kv_heads=6, layout="zigzag", with_lse=False)
    q, k, v = ask.whole()[:3]

    def program(group):
        s = lr.Sharding(42, group, "zigzag")
        mine = [s.shard(x) for x in (q, k, v)]
        return s.unshard(lr.dilated_attention(*mine, **options, group=group, layout="zigzag"))

    assert relative_error(run_ranks(3, program)[0], answer(ask).out) < 1e-14


# ------------------------------------------------------------------------------------------------------ refusals

Q = torch.zeros(1, 20, 4, 4)
GOOD = {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"compat": "longnet"}, "compat must be 'torchscale' or None, got 'longnet'"),
        ({"compat": True}, "compat must be 'torchscale' or None, got True"),
        ({"phase": "mod"}, "phase='mod' contradicts compat='torchscale'"),
        ({"mixing_gradient": True}, "mixing_gradient=True contradicts compat='torchscale'"),
        ({"documents": [0, 4, 20]}, "documents contradict compat='torchscale'"),
        ({"return_lse": True}, "return_lse=True: compat='torchscale'"),
        ({"query_offset": 3}, "attention of a sequence to itself, got 20 queries from position 3 on over 20 keys"),
    ],
)
def test_what_contradicts_it(words, match):
    with pytest.raises(lr.ArgumentError, match=match):
        lr.dilated_attention(Q, Q, Q, **{**GOOD, **COMPAT, **words})


def test_what_does_not_contradict_it():
    want = lr.dilated_attention(Q, Q, Q, **GOOD, **COMPAT)
    named = {"phase": "block", "mixing_gradient": False, "query_offset": 0, "return_lse": False}
    assert torch.equal(lr.dilated_attention(Q, Q, Q, **GOOD, **COMPAT, **named), want)


def test_fewer_queries_than_keys():
    with pytest.raises(lr.PatternError, match="got 5 queries from position 15 on over 20 keys"):
        lr.dilated_attention(Q[:, -5:], Q, Q, **GOOD, **COMPAT)


def test_fewer_kv_heads_than_heads():
    with pytest.raises(lr.PatternError, match="a kv head for every head, got 4 heads and 2 kv heads"):
        lr.dilated_attention(Q, Q[:, :, :2], Q[:, :, :2], **GOOD, **COMPAT)


@pytest.mark.parametrize("causal", [True, False])
def test_outputs_that_the_released_code_misplaces(causal):
    """Segments of 6 at rate 4 are padded to 8 there: the second one's outputs come 2 positions late."""
    words = {"segment_lengths": [20, 6], "dilation_rates": [1, 4], "causal": causal, **COMPAT}
    with pytest.raises(lr.PatternError, match=r"segments of 6 at rate 4 over 20 tokens: .* 4 segments to 8 .* i \* 2"):
        lr.dilated_attention(Q, Q, Q, **words)
    lr.dilated_attention(Q[:, :6], Q[:, :6], Q[:, :6], **words)  # one segment: nothing comes late


def test_the_branches_of_prov_gigapath():
    """Whose fourth segments are no multiple of their rate: fine for one of them, which is 185,363 tokens."""
    pattern = lr.Dilated([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16], causal=False, phase="block")
    branch, *_ = released_branches(pattern, torch.empty(1, 1, 16, 48))
    branch.check(Problem(1, 185_363, 185_363, 16, 0))
    with pytest.raises(lr.PatternError, match="segments of 185363 at rate 8 over 185364 tokens"):
        branch.check(Problem(1, 185_364, 185_364, 16, 0))


def test_nothing_is_computed_before_all_branches_are_looked_at(monkeypatch):
    monkeypatch.setattr("longring.functional.ExactAttention.apply", lambda *args: pytest.fail("computed"))
    with pytest.raises(lr.PatternError, match="segments of 6 at rate 4"):
        lr.dilated_attention(Q, Q, Q, segment_lengths=[8, 6], dilation_rates=[1, 4], **COMPAT)


def test_no_tensor_at_all():
    with pytest.raises(lr.ArgumentError, match="q must be a tensor, got NoneType"):
        lr.dilated_attention(None, Q, Q, **GOOD, **COMPAT)


def test_every_rank_refuses_by_name():
    def program(group):
        words = {"segment_lengths": [6], "dilation_rates": [4], **COMPAT, "group": group, "layout": "contiguous"}
        with pytest.raises(lr.PatternError, match=rf"^rank {group.rank}: segments of 6 at rate 4 over 40 tokens"):
            lr.dilated_attention(Q, Q, Q, **words)

    run_ranks(2, program)
