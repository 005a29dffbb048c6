"""Lanes of shared memory, with threads for CUDA streams: the protocol, and the whole transport over it."""

from __future__ import annotations

import itertools

import pytest
import torch

from belts import ThreadBelt, ThreadShore
from longring.errors import TransportError
from longring.transport.lanes import SLOTS, Plan, Receiving, Sending, Shared, as_bytes, move_all
from longring.transport.lines import Letter
from longring.transport.opening import Introduction, common_obstacle
from longring.transport.symmetric import Region
from worlds import World, results

# ------------------------------------------------------------------------------------------------------ the protocol


@pytest.mark.parametrize("size", [2, 3, 8, 64])
@pytest.mark.parametrize("outbox", [1, 10_000, 1 << 20, 128 << 20])
def test_flags_and_lanes_of_a_memory_are_apart(size, outbox):
    plan = Plan(size, outbox)
    assert plan.slot >= 4096
    assert plan.slot % 4096 == 0
    assert plan.lanes_bytes <= max(outbox, SLOTS * 4096 * (size - 1))
    flags, lanes = (torch.empty(count, dtype=torch.uint8) for count in (plan.flags_bytes, plan.lanes_bytes))
    for rank in range(min(size, 5)):
        others = [other for other in range(size) if other != rank]
        signals = [plan.ready(flags, other) for other in others] + [plan.taken(flags, other) for other in others]
        assert_apart(signals, flags)
        assert_apart([plan.lane(lanes, rank, other) for other in others], lanes)


def assert_apart(places, memory):
    start = memory.data_ptr()
    spans = sorted((place.data_ptr() - start, place.data_ptr() - start + place.nbytes) for place in places)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert spans[0][0] >= 0
    assert spans[-1][1] <= memory.nbytes


def memories(plan):
    sizes = plan.flags_bytes, plan.lanes_bytes
    return Shared(plan, *([torch.zeros(size, dtype=torch.uint8) for _ in range(plan.size)] for size in sizes))


def pair(outbox, first=0):
    """Two memories, and both ends of the lane from rank 0 to rank 1, which have moved `first` pieces before."""
    plan = Plan(2, outbox)
    shared = memories(plan)
    sending = Sending.over(shared, 0, 1, ThreadBelt())
    receiving = Receiving.over(shared, 1, 0, ThreadBelt())
    for end in (sending, receiving):
        end._count.pieces = first
        end.heard.fill_((first + 2**31) % 2**32 - 2**31)
    return plan, sending, receiving


@pytest.mark.parametrize("first", [0, 2**31 - 3, 2**32 - 4])
@pytest.mark.parametrize("sizes", [[1], [8192, 8193, 0, 1], [100_000, 3], [4096] * 9])
def test_messages_of_any_size_arrive_in_order_also_across_an_overflow(sizes, first):
    _, sending, receiving = pair(8192, first)
    messages = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    buffers = [torch.zeros_like(message) for message in messages]
    move_all([(sending, messages)])
    move_all([(receiving, buffers)])
    mark = receiving.belt.mark()
    mark._passed.wait(10)
    assert all(map(torch.equal, buffers, messages))
    assert sending.pieces == receiving.pieces == first + sum(-(-size // 4096) for size in sizes)


def test_a_sender_waits_for_its_slots():
    _, sending, receiving = pair(8192)
    move_all([(sending, [torch.ones(3 * 4096, dtype=torch.uint8)])])
    blocked = sending.belt.mark()
    assert not blocked._passed.wait(0.2)
    move_all([(receiving, [torch.empty(4096, dtype=torch.uint8)])])
    assert blocked._passed.wait(10)


@pytest.mark.parametrize("end", [0, 1], ids=["sending", "receiving"])
def test_the_host_can_let_an_end_go(end):
    lonely = pair(8192, 2**32 - 3)[1 + end]
    move_all([(lonely, [torch.ones(9 * 4096, dtype=torch.uint8)])])
    mark = lonely.belt.mark()
    assert not mark._passed.wait(0.2)
    lonely.let_go()
    assert mark._passed.wait(10)


def test_pieces_of_all_ways_take_turns():
    order = []

    class End:
        def __init__(self, name):
            self.name = name

        def move(self, message):
            for piece in range(message):
                order.append((self.name, piece))
                yield

    move_all([(End("up"), [2, 1]), (End("down"), [1]), (End("idle"), [0])])
    assert order == [("up", 0), ("down", 0), ("up", 1), ("up", 0)]


def test_any_tensor_is_bytes():
    for tensor in (torch.tensor(3.0), torch.zeros(2, 3, dtype=torch.bfloat16)[1:], torch.ones(5, dtype=torch.bool)):
        whole = as_bytes(tensor.requires_grad_() if tensor.is_floating_point() else tensor)
        assert whole.numel() == tensor.nbytes
        assert whole.data_ptr() == tensor.data_ptr()


def test_a_tensor_of_another_device_is_refused():
    region = Region(1, memories(Plan(2, 8192)), ThreadShore(), {})
    with pytest.raises(TransportError, match=r"rank 1: symmetric .* is on cpu, and the tensor is on meta; call torch"):
        region.post([Letter(True, 0, torch.zeros(1, device="meta"), 0)])


def test_ranks_share_memory_only_on_one_machine_and_only_if_all_can():
    one, two = (Introduction(machine, f"host of {machine}", 7, None) for machine in ("here", "there"))
    assert common_obstacle([one, one]) is None
    assert common_obstacle([one, one, two]) == "rank 2 on host of there shares no memory with rank 0 on host of here"
    assert common_obstacle([one, one._replace(obstacle="no GPU")]) == "rank 1: no GPU"


# ----------------------------------------------------------------------------------------- the transport, on processes

processes = pytest.mark.processes


@processes
@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_meets_every_rank(size):
    around = [[[float((rank - step) % size)] for step in range(1, size)] for rank in range(size)]
    assert results(size, "programs:on_belts", "ring", 8192, 3) == [met * 3 for met in around]


@processes
@pytest.mark.parametrize(
    ("program", "args", "expected"),
    [
        ("three_letters", (), [None, [[1, 2, 3]] * 3]),
        ("many_at_once", (6,), [[10 * (1 - rank) + number for number in range(6)] for rank in range(2)]),
        ("nothing_to_say", (), [0, 0]),
        ("every_dtype", (), [[1] * 6, [0] * 6]),
        ("two_buffers", (20,), [[float(step + 100 * (1 - rank)) for step in range(20)] for rank in (0, 1)]),
    ],
)
def test_the_contract_of_transports(program, args, expected):
    assert results(2, "programs:on_belts", program, 8192, *args) == expected


@processes
@pytest.mark.parametrize("size", [2, 3])
def test_messages_larger_than_their_lane_go_through_in_pieces(size):
    assert results(size, "programs:on_belts", "sizes", 16384, [1, 4095, 50_001, 3, 0, 123_456]) == [0] * size


@processes
def test_nobody_waits_in_a_circle():
    assert results(4, "programs:on_belts", "everybody_to_everybody", 3 * 8192, 60_000) == [0] * 4


@processes
def test_attention_over_lanes_is_exact():
    schedules = ["ring", "bidirectional", "exchange", "gather", "ulysses"]
    assert results(2, "programs:on_belts", "judged", 8192, schedules, torch.float32) == [[]] * 2


@processes
def test_ranks_that_disagree_raise_and_end():
    outcomes = World(3, "programs:on_belts", ("disagree", 8192, 1, [1], "length", 13, 14, 20.0)).run()
    for outcome in outcomes:
        assert outcome.error == "Disagreement", outcome.printed
        assert "length is 14 on rank 1, and 13 on ranks 0, 2" in outcome.text
        assert outcome.status == 0


@processes
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_lost_rank_is_named_within_the_timeout(how):
    outcomes = World(3, "programs:on_belts", ("ring_with_a_victim", 8192, 1, 4, how, 3.0, 4), absent=(1,)).run()
    for rank in (0, 2):
        assert outcomes[rank].error == "PeerLost", outcomes[rank].printed
        assert outcomes[rank].rank_named == 1
        assert outcomes[rank].status == 0, outcomes[rank].printed


@processes
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_who_does_not_wait_on_the_host_finds_nan_and_then_the_name(how):
    outcomes = World(3, "programs:on_belts", ("lost_on_the_way", 8192, 1, how), absent=(1,)).run(limit=40)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].printed
        is_as_promised, text, named = outcomes[rank].value
        assert is_as_promised
        assert named == 1, text
        assert outcomes[rank].status == 0, outcomes[rank].printed


@processes
def test_a_timeout_is_kept_while_the_vigil_looks_after_an_earlier_call():
    args = ("lost_behind_a_call_without_a_timeout", 8192, 1, "stop", 2.0)
    outcomes = World(3, "programs:on_belts", args, absent=(1,)).run(limit=40)
    for rank in (0, 2):
        kind, seconds = outcomes[rank].value
        assert kind == "PeerLost"
        assert seconds < 8.0  # 2.5 on an idle machine; the vigil waits for 60


@processes
def test_where_the_driver_takes_no_orders_the_process_ends_and_says_why():
    """The rank before the lost one has all it waits for, and goes on."""
    args = ("lost_where_the_driver_hangs", 1 << 16, 1, "kill")
    before, _, after = World(3, "programs:on_belts", args, absent=(1,)).run(limit=40)
    assert (before.value[2], before.status) == (1, 0), before.printed
    assert after.status == 1
    assert "longring: rank 2 waited for rank 1, a rank of the group is lost, and the device takes" in after.printed


@processes
def test_what_one_rank_cannot_share_none_does():
    """The others could allocate nothing here either, but the first obstacle is everyone's reason."""
    for said, reason in results(3, "programs:memory_that_cannot_be_shared", 0):
        assert said == ["fine", "fine"]
        assert reason == "rank 0: no GPU here"


@processes
def test_symmetric_memory_that_was_asked_for_by_name_is_had_or_missed():
    environment = {"LONGRING_TRANSPORT": "symmetric"}
    for said, _ in results(2, "programs:memory_that_cannot_be_shared", 0, environment=environment):
        assert said == ["LONGRING_TRANSPORT=symmetric cannot be had: rank 0: no GPU here"] * 2


@processes
def test_another_way_is_refused():
    for said, _ in results(2, "programs:memory_that_cannot_be_shared", 0, environment={"LONGRING_TRANSPORT": "x"}):
        assert said == ['LONGRING_TRANSPORT must be "symmetric" or "staged", or not be set; got \'x\''] * 2


# ---------------------------------------------------------------------------------------------- staging, without a GPU


@processes
@pytest.mark.parametrize(
    ("program", "args", "expected"),
    [
        ("ring", (3,), [[[1.0]] * 3, [[0.0]] * 3]),
        ("three_letters", (), [None, [[1, 2, 3]] * 3]),
        ("every_dtype", (), [[1] * 6, [0] * 6]),
        ("sizes", ([1, 4095, 50_001, 0],), [0, 0]),
    ],
)
def test_what_is_staged_arrives(program, args, expected):
    assert results(2, "programs:staged", program, *args) == expected


@processes
def test_who_is_lost_while_staging_is_named():
    outcomes = World(3, "programs:staged", ("ring_with_a_victim", 1, 4, "kill", 3.0, 4), absent=(1,)).run()
    for rank in (0, 2):
        assert outcomes[rank].error == "PeerLost", outcomes[rank].printed
        assert outcomes[rank].rank_named == 1
        assert outcomes[rank].status == 0, outcomes[rank].printed
