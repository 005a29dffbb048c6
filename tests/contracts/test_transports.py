"""What every transport promises, on ranks that are threads and on ranks that are processes."""

import pytest

import programs
from longring.transport.loopback import run_ranks
from worlds import results


def over_threads(size, program, *args):
    return run_ranks(size, lambda transport: getattr(programs, program)(transport, *args))


def over_processes(size, program, *args):
    return results(size, f"programs:{program}", *args)


@pytest.fixture(params=[over_threads, pytest.param(over_processes, marks=pytest.mark.processes)])
def run(request):
    return request.param


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_ring_meets_every_rank(run, size):
    around = [[[float((rank - step) % size)] for step in range(1, size)] for rank in range(size)]
    assert run(size, "ring", 3) == [met * 3 for met in around]


def test_messages_of_one_channel_arrive_in_the_order_they_were_posted(run):
    assert run(2, "three_letters")[1] == [[1, 2, 3]] * 3


def test_channels_are_apart(run):
    heard = run(4, "all_to_all")
    assert heard == [{a: [10 * a + b] * (1 + a) for a in range(4) if a != b} for b in range(4)]


def test_posts_may_be_waited_for_in_any_order_and_overlap(run):
    assert run(3, "many_at_once", 6) == [[10 * ((rank - 1) % 3) + number for number in range(6)] for rank in range(3)]


def test_empty_tensors_and_empty_posts_are_fine(run):
    assert run(3, "nothing_to_say") == [0, 0, 0]


def test_a_buffer_is_free_again_after_its_wait(run):
    """Sent from and received into the same two buffers all the time, overwritten as soon as waited for."""
    steps = 20
    assert run(2, "two_buffers", steps) == [
        [float(step + 100 * (1 - rank)) for step in range(steps)] for rank in (0, 1)
    ]


def test_every_dtype_travels(run):
    assert run(2, "every_dtype") == [[1 - rank] * 6 for rank in range(2)]


def test_bytes_are_counted_where_they_are_sent(run):
    assert run(3, "count_bytes") == [0, 46, 92]


def test_a_conversation_without_messages_is_fine(run):
    assert run(3, "only_greet", 4) == [4, 4, 4]


def test_what_cannot_be_sent_is_refused_by_name(run):
    crooked, oneself, nobody = "can only send and receive contiguous", "with rank 0", "with rank 2"
    for refused, expected in zip(run(2, "refusals")[0], [crooked, crooked, oneself, nobody, nobody], strict=True):
        assert expected in refused
        assert refused.startswith("rank 0")
