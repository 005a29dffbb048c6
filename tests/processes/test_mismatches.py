"""One rank makes another call than the others: all raise the same error within two seconds, and no number comes out.

Every term that is compared has its case in `test_terms.py`; here are its words, and groups that have called before.
"""

import pytest

from losing import WORDS, disagreements
from worlds import World

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("good", [0, 3], ids=["cold", "warm"])
@pytest.mark.parametrize("kind", WORDS)
def test_one_rank_differs(kind, good):
    disagreements(kind, good)


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
