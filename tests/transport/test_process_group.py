"""Real processes over Gloo: groups of all kinds, what is written down, and calls that do not agree."""

import json
import re
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from longring.errors import ArgumentError, TransportError
from longring.transport import board, lines
from longring.transport.agreement import difference, signed
from longring.transport.select import transport_for
from worlds import World, results

pytestmark = pytest.mark.processes


# ------------------------------------------------------------------------------------------------ groups of all kinds


def test_sub_groups_have_their_own_ranks_and_one_transport_each():
    for rank, (own, met, refused) in enumerate(results(4, "programs:sub_groups")):
        assert own == rank // 2
        assert met == [[float(1 - own)]] * 2
        assert refused == "this rank is not in the group it was given; only its members call with it"


def test_meshes_of_one_and_two_dimensions():
    for rank, met in enumerate(results(4, "programs:meshes")):
        assert met["row"] == (rank % 2, 2, 2, [[float(1 - rank % 2)]])
        assert met["whole"] == (rank, 4, 2, [[float((rank - step) % 4)] for step in (1, 2, 3)])
        assert met["part"] == (rank % 2, 2, 2, [[float(1 - rank % 2)]])


def test_meshes_that_cannot_be_a_ring_are_refused():
    for rank, said in enumerate(results(4, "programs:refused_meshes")):
        assert "whose ranks rise" in said[0]
        assert "one or two dimensions, got 3" in said[1]
        assert len(said) == (3 if rank > 1 else 2), said
        assert all("not in the mesh" in text for text in said[2:])


@pytest.mark.parametrize(("local", "close"), [("2", 2), ("4", 4), ("3", 4), ("", 4), ("x", 4)])
def test_the_launcher_says_who_is_close(local, close):
    assert results(4, "programs:node_ranks", environment={"LOCAL_WORLD_SIZE": local}) == [close] * 4


def test_a_group_that_is_gone_is_not_kept():
    assert results(2, "programs:group_is_let_go") == [True, True]


def test_a_world_may_end_and_begin_again_over_the_same_store():
    said = results(2, "programs:groups_in_turn", 3)
    assert said[0] == said[1]
    assert [re.findall(r"is (\d+) on rank", text) for text in said[0]] == [["14"], ["15"]]


def test_without_a_timeout_the_groups_own_counts():
    assert results(2, "programs:own_timeout") == [60.0, 60.0]


def test_what_is_no_group_is_refused():
    for group in (3, "world", object()):
        with pytest.raises(ArgumentError, match="group must be a longring transport, a torch ProcessGroup or a Device"):
            transport_for(group)


def test_tensors_that_the_backend_cannot_carry_are_refused():
    class Group:
        def _get_backend(self, device):
            if device.type == "cpu":
                raise RuntimeError("no backend")
            return self

        def name(self):
            return "gloo"

    with pytest.raises(TransportError, match=r"rank 3: .* tensors on cpu .* \(its backend there: none\)"):
        lines.check_device(Group(), torch.zeros(1), 3)
    with pytest.raises(TransportError, match=r"rank 0: .* tensors on meta .* \(its backend there: gloo\)"):
        lines.check_device(Group(), torch.zeros(1, device="meta"), 0)


# ------------------------------------------------------------------------------------------------- what is written


def test_a_journal_has_every_post_of_its_time():
    for entries, in_journal, in_all in results(3, "programs:journal"):
        assert entries == [("call 0, step 1", 40, 40), ("call 0, step 2", 40, 40)]
        assert (in_journal, in_all) == (80, 240)


def test_the_store_does_not_grow_with_the_calls():
    ranks = 3
    before, after = results(ranks, "programs:keys_in_the_store", 20)[0]
    assert before <= after <= before + ranks  # a note of each rank, where it had to wait for a busy machine


def test_a_flight_record_is_written_when_asked_for_and_the_error_points_to_it():
    outcomes = World(2, "programs:disagree", (2, [1], "length", 13, 14, 5.0), environment={"LONGRING_DEBUG": "1"}).run()
    for rank, outcome in enumerate(outcomes):
        path = Path(outcome.text.rpartition("; flight record: ")[2])
        assert path.stat().st_mode & 0o777 == 0o600
        events = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(event["rank"] == rank for event in events)
        assert [event["event"] for event in events] == ["call", "post", "done"] * 2 + ["call", "post", "verdict"]
        assert events[1]["what"] == "call 0, step 1"
        path.unlink()


def test_without_debugging_nothing_is_written():
    for outcome in World(2, "programs:disagree", (0, [1], "length", 13, 14, 5.0)).run():
        assert outcome.error == "Disagreement"
        assert "flight record" not in outcome.text


# ---------------------------------------------------------------------------------------------------- disagreement


def disagreement(outcomes):
    """The one message of all ranks, which all raised soon and then ended by themselves."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == "Disagreement", f"rank {rank}: {outcome.error} {outcome.text} {outcome.printed}"
        assert outcome.status == 0, f"rank {rank} ended with {outcome.status}\n{outcome.printed}"
    messages = {outcome.text for outcome in outcomes}
    assert len(messages) == 1
    assert max(outcome.at for outcome in outcomes) - min(outcome.at for outcome in outcomes) < 4.0
    return messages.pop()


@pytest.mark.parametrize("good", [0, 3])
@pytest.mark.parametrize(
    ("size", "odd", "who"),
    [
        (2, [1], "14 on rank 1, and 13 on rank 0"),
        (3, [0], "14 on rank 0, and 13 on ranks 1, 2"),
        (4, [2], "14 on rank 2, and 13 on ranks 0, 1, 3"),
        (4, [1, 3], "14 on ranks 1, 3, and 13 on ranks 0, 2"),
        (5, [0, 1, 2], "13 on ranks 3, 4, and 14 on ranks 0, 1, 2"),
    ],
)
def test_ranks_that_disagree_raise_the_same_at_once(size, odd, who, good):
    began, ends = time.monotonic(), "as usual" if good else "at once"
    message = disagreement(World(size, "programs:disagree", (good, odd, "length", 13, 14, 60.0), ends=ends).run())
    assert message == f"ranks disagree: length is {who}; all ranks must make the same call"
    assert time.monotonic() - began < 12.0


def test_a_new_call_posts_nothing_until_all_have_confirmed_it():
    assert results(3, "programs:posts_when_ranks_disagree", 0) == [0, 0, 0]
    assert results(3, "programs:posts_when_ranks_disagree", 2) == [2, 0, 0]  # rank 0 makes the call all know


def test_no_two_messages_have_one_tag():
    """Neither two of one call nor those of two calls that are alike."""
    assert results(3, "programs:tags", 3) == [(12, 12)] * 3


def test_a_rank_that_repeats_an_old_call_while_others_make_a_new_one():
    message = disagreement(World(3, "programs:disagree_on_an_old_call", (1, 60.0)).run())
    assert "length is 13 on rank 1, and 14 on ranks 0, 2" in message


def test_a_rank_that_is_a_call_behind_is_a_disagreement():
    message = disagreement(World(3, "programs:one_counts_a_call_less", (1, 60.0)).run())
    assert "the number of this call is 2 on rank 1, and 3 on ranks 0, 2" in message


def test_the_first_verdict_counts():
    store, first, second = HashStore(), board.Verdict("lost", 1, "first"), board.Verdict("lost", 2, "second")
    assert [board._write_verdict(store, verdict) for verdict in (first, second)] == [first, first]
    assert board._read_verdict(store) == first


def test_another_version_of_the_library_is_a_disagreement():
    message = disagreement(World(3, "programs:another_version", (2, 60.0)).run())
    assert re.search(r"longring's version is '0.0.9' on rank 2, and '.*' on ranks 0, 1;", message)


def test_ranks_that_see_other_machines_disagree():
    message = disagreement(World(4, "programs:another_machine", (3, 60.0), ends="at once").run())
    assert message.startswith("ranks disagree: ranks of a node is 2 on rank 3, and 4 on ranks 0, 1, 2; all ranks must")


def test_a_broken_group_says_so_ever_after():
    for said in results(2, "programs:broken_group_stays_broken"):
        assert said[0].startswith("ranks disagree: length is 14 on rank 1, and 13 on rank 0")
        assert said[1] == said[2]
        assert "this group broke in an earlier call and cannot be used; make a new one (ranks disagree" in said[1]


def test_differences_are_shown_where_they_are():
    documents = list(range(0, 5000, 7))
    other = [*documents[:-3], 4980, *documents[-2:]]
    said = {rank: signed({"documents": tuple(other if rank == 1 else documents)}).words for rank in range(3)}
    text = difference(said, 3)
    assert text is not None
    assert "4980" in text
    assert len(text) < 400


def test_long_terms_differ_in_their_digest_at_least():
    long, longer = "a" * 20_000, "a" * 20_001
    text = difference({0: signed({"x": [long]}).words, 1: signed({"x": [longer]}).words}, 2)
    assert text is not None
    assert text.count("digest") == 2


def test_who_was_not_heard_is_said_and_equal_terms_are_no_difference():
    assert difference({0: {"a": "1"}, 1: {"a": "1"}}, 2) is None
    text = difference({0: {"a": "1"}, 2: {"a": "2", "b": "3"}}, 4)
    assert text == (
        "ranks disagree: a is 2 on rank 2, and 1 on rank 0; b is 3 on rank 2, and not given on rank 0; "
        "nothing was heard of ranks 1, 3; all ranks must make the same call"
    )


def test_signatures_tell_terms_apart_and_do_not_depend_on_their_order():
    terms = {"length": 13, "dtype": torch.float32, "shards": (range(5), range(5, 13))}
    assert signed(terms) == signed(dict(reversed(terms.items())))
    others = [
        {**terms, "length": 14},
        {**terms, "dtype": torch.float64},
        {**terms, "shards": (range(5), range(5, 14))},
        {**terms, "more": None},
        {"length13": 13, **terms},
    ]
    assert len({signed(each).fingerprint for each in [terms, *others]}) == 6


# --------------------------------------------------------------------------------------------- patience and its end


def test_a_late_rank_is_no_error():
    assert results(3, "programs:late_but_there", 1, 2.5) == [[[float((r - s) % 3)] for s in (1, 2)] for r in range(3)]


def test_a_rank_that_is_busy_elsewhere_is_named():
    outcomes = World(3, "programs:one_makes_a_call_more", (1, 2.0), absent=(1,)).run()
    for rank in (0, 2):
        assert outcomes[rank].error == "PeerLost"
        assert outcomes[rank].rank_named == 1
        assert "no sign of life from rank 1: stopped, cut off, or busy with something else" in outcomes[rank].text
        assert outcomes[rank].status == 0


def test_ranks_that_wait_for_each_other_are_told_so():
    for outcome in World(3, "programs:crossed_circle", (2.0,)).run():
        assert outcome.error == "PeerLost"
        assert outcome.rank_named is None
        assert "ranks wait for each other (" in outcome.text
        assert outcome.phase_and_step == "a circle"
        assert outcome.status == 0


def test_an_answer_that_comes_while_the_blame_is_sought_is_taken():
    assert results(2, "programs:late_but_there", 1, 2.5, 4.0) == [[[1.0]], [[0.0]]]


# --------------------------------------------------------------------------------- a backend without tags, as NCCL is


@pytest.mark.parametrize("size", [2, 3])
def test_a_group_without_gloo_greets_through_a_companion_and_posts_when_all_agree(size):
    around = [[[float((rank - step) % size)] for step in range(1, size)] for rank in range(size)]
    for rank, (met, order) in enumerate(results(size, "programs:through_a_companion", 3)):
        assert met == around[rank] * 3
        assert order == ["by stream", "posted", "done"] * (3 * (size - 1))


def test_such_a_group_posts_in_the_order_of_the_caller():
    assert results(2, "programs:posts_in_order") == [(0, 7.0)] * 2


def test_such_a_group_disagrees_before_anything_is_posted():
    for outcome in World(3, "programs:disagree_through_a_companion", (1,), ends="at once").run():
        assert outcome.error == "Disagreement"
        assert outcome.text.endswith("length is 14 on rank 1, and 13 on ranks 0, 2; all ranks must make the same call")
        assert "posted" not in outcome.printed
