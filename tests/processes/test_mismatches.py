"""One rank makes another call than the others: all raise the same error within seconds, and no number comes out."""

import time

import pytest

from worlds import World

pytestmark = pytest.mark.processes

WORDS = {
    "length": "length is 14 on rank 1, and 13 on ranks 0, 2;",
    "dtype": "dtype is torch.float64 on rank 1, and torch.float32 on ranks 0, 2;",
    "heads": "heads is 6 on rank 1, and 4 on ranks 0, 2;",
    "kv heads": "kv heads is 4 on rank 1, and 2 on ranks 0, 2;",
    "causal": "causal=False",
    "segments": "12",
    "documents": "6",
    "schedule": "schedule is 'gather' on rank 1, and 'ring' on ranks 0, 2;",
    "deterministic": "deterministic is True on rank 1, and False on ranks 0, 2;",
    "version": "longring's version is '0.0.9' on rank 1, and '",
    "operation": "call is ",
}


@pytest.mark.parametrize("good", [0, 3], ids=["cold", "warm"])
@pytest.mark.parametrize("kind", WORDS)
def test_one_rank_differs(kind, good):
    began = time.monotonic()
    outcomes = World(3, "programs:attention_that_differs", (good, 1, kind)).run()
    for rank, outcome in enumerate(outcomes):
        assert outcome.value is None, f"rank {rank} has a result: {outcome.value}"
        assert outcome.error == "Disagreement", f"rank {rank}: {outcome.error}: {outcome.text}\n{outcome.printed}"
        assert outcome.status == 0, f"rank {rank} ended with {outcome.status}\n{outcome.printed}"
    messages = {outcome.text for outcome in outcomes}
    assert len(messages) == 1
    message = messages.pop()
    assert message.startswith("ranks disagree: ")
    assert WORDS[kind] in message
    assert message.count("on rank 1, and ") >= 1
    assert message.endswith("; all ranks must make the same call")
    assert time.monotonic() - began < 15.0


@pytest.mark.slow
@pytest.mark.parametrize("good", [0, 3], ids=["cold", "warm"])
@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("kind", WORDS)
def test_any_one_rank_differs(kind, size, good):
    for odd in range(size):
        outcomes = World(size, "programs:attention_that_differs", (good, odd, kind)).run()
        assert [(outcome.error, outcome.status) for outcome in outcomes] == [("Disagreement", 0)] * size
        assert len({outcome.text for outcome in outcomes}) == 1
        assert size == 2 or f"on rank {odd}, and " in outcomes[0].text
