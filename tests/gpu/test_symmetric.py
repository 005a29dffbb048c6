"""Real processes that share one GPU: symmetric memory and CUDA streams, and staging through the host."""

from __future__ import annotations

import pytest
import torch

from worlds import World, results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.timeout(200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ONE_GPU = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
STAGED = {"LONGRING_TRANSPORT": "staged"}
LANE = 112 << 20  # of two ranks
LIMIT = 150.0  # a process takes seconds to find its GPU, and eight of them share the cores and compile


def on_a_gpu(size, program, *args, watched=True, environment=ONE_GPU):
    return results(size, "programs:on_a_gpu", program, watched, *args, limit=LIMIT, environment=environment)


def world(size, program, *args, watched=True, environment=ONE_GPU, absent=()):
    return World(size, "programs:on_a_gpu", (program, watched, *args), environment=environment, absent=absent).run(
        LIMIT
    )


# ----------------------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_ring_meets_every_rank(size):
    around = [[[float((rank - step) % size)] for step in range(1, size)] for rank in range(size)]
    assert on_a_gpu(size, "ring", 3) == [met * 3 for met in around]


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize(
    ("program", "args", "expected"),
    [
        ("three_letters", (), [None, [[1, 2, 3]] * 3]),
        ("many_at_once", (40,), [[10 * (1 - rank) + number for number in range(40)] for rank in range(2)]),
        ("nothing_to_say", (), [0, 0]),
        ("every_dtype", (), [[1] * 6, [0] * 6]),
        ("two_buffers", (100,), [[float(step + 100 * (1 - rank)) for step in range(100)] for rank in (0, 1)]),
    ],
)
def test_the_contract_of_transports(program, args, expected, watched):
    assert on_a_gpu(2, program, *args, watched=watched) == expected


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_any_size_go_through(size, watched):
    sizes = [1, 4097, 3_000_001, 0, 2 * LANE + 12_345, 7]
    assert on_a_gpu(size, "sizes", sizes, watched=watched) == [0] * size


@pytest.mark.parametrize("connections", ["8", "32"])
def test_eight_ranks_do_not_wait_in_a_circle(connections):
    """Messages of five pieces, on 14 streams a rank, with as many queues of the hardware as usual and as can be."""
    environment = ONE_GPU | {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    numbers = 40 << 20
    assert on_a_gpu(8, "everybody_to_everybody", numbers, environment=environment) == [0] * 8


# ------------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_attention_is_exact(size, dtype):
    schedules = ["ring", "bidirectional", "exchange", "gather", "ulysses", "hybrid"]
    assert on_a_gpu(size, "judged", schedules, dtype, watched=False)[0] == []


def test_attention_that_is_watched_is_exact():
    assert on_a_gpu(4, "judged", ["ring", "gather"], torch.float32)[0] == []


# ---------------------------------------------------------------------------------------------------------- faults


def named(outcomes, victim):
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error == "PeerLost", f"rank {rank}: {outcome.error} {outcome.text}\n{outcome.printed}"
            assert outcome.rank_named == victim, outcome.text
            assert outcome.status == 0, f"rank {rank} ended with {outcome.status}\n{outcome.printed}"


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_lost_rank_is_named_within_the_timeout(how):
    named(world(4, "ring_with_a_victim", 1, 5, how, 3.0, 4, absent=(1,)), victim=1)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_who_does_not_wait_on_the_host_finds_nan_and_then_the_name(how):
    outcomes = world(3, "lost_on_the_way", 1, how, watched=False, absent=(1,))
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].printed
        is_as_promised, text, lost = outcomes[rank].value
        assert is_as_promised, text
        assert lost == 1, text
        assert outcomes[rank].status == 0, outcomes[rank].printed


def test_who_loads_a_kernel_behind_a_lost_message_ends_or_finds_nan():
    """CUDA loads a kernel when it is first used, and lets nobody launch anything until all before it is done."""
    _, _, after = world(3, "lost_before_a_new_kernel", 1, "kill", watched=False, absent=(1,))
    if after.status == 0:
        assert after.value[0], after.value
    else:
        assert after.status == 1, after.printed
        assert "rank 2 waited for rank 1" in after.printed


def test_ranks_that_disagree_raise_and_end():
    for outcome in world(3, "disagree", 1, [1], "length", 13, 14, 20.0):
        assert outcome.error == "Disagreement", outcome.printed
        assert "length is 14 on rank 1, and 13 on ranks 0, 2" in outcome.text
        assert outcome.status == 0, outcome.printed


def test_ranks_that_all_is_well_with_end_by_themselves():
    for outcome in world(2, "ring", 3):
        assert outcome.error is None, outcome.printed
        assert outcome.status == 0, outcome.printed


def test_without_leave_to_share_a_gpu_it_goes_through_the_host():
    """Torch refuses symmetric memory of ranks on one GPU, on every rank alike."""
    without = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "0", "LONGRING_TRANSPORT": "symmetric"}
    outcomes = world(2, "ring", 1, environment=without)
    for outcome in outcomes:
        assert outcome.error == "TransportError", outcome.printed
        assert "LONGRING_TRANSPORT=symmetric cannot be had: rank 0: " in outcome.text


# --------------------------------------------------------------------------------------------------------- staging


@pytest.mark.parametrize(
    ("program", "args", "expected"),
    [
        ("ring", (3,), [[[1.0]] * 3, [[0.0]] * 3]),
        ("three_letters", (), [None, [[1, 2, 3]] * 3]),
        ("every_dtype", (), [[1] * 6, [0] * 6]),
        ("two_buffers", (20,), [[float(step + 100 * (1 - rank)) for step in range(20)] for rank in (0, 1)]),
        ("sizes", ([1, 4097, 3_000_001, 0],), [0, 0]),
    ],
)
def test_what_is_staged_through_the_host_arrives(program, args, expected):
    assert on_a_gpu(2, program, *args, environment=STAGED) == expected


def test_attention_that_is_staged_is_exact():
    assert on_a_gpu(3, "judged", ["ring", "exchange"], torch.float32, environment=STAGED)[0] == []


def test_who_is_lost_while_staging_is_named():
    named(world(3, "ring_with_a_victim", 1, 4, "kill", 3.0, 4, environment=STAGED, absent=(1,)), victim=1)
