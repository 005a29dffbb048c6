"""How much each rank computes: exact, since it is a count of integers."""

from functools import lru_cache, partial
from math import gcd

from ..geometry.heads import ByHeads, near_and_far
from ..geometry.layouts import Shard
from ..geometry.patterns import Dilated, phases
from ..geometry.plans import plan
from ..geometry.ranges import meet, moved
from ..geometry.task import Task, tiles_of
from ..geometry.tiles import Tile


def pairs(task: Task, rank: int) -> int:
    """(batch row, kv head, query, key) quadruples that `rank` computes; times heads / kv_heads for query heads."""
    return _pairs_of(task, task.queries.shards[rank], range(task.problem.kv_heads))


def head_pairs(task: Task, schedule: str, rank: int, node_ranks: int) -> int:
    """The same under a schedule, by query heads."""
    if schedule not in ("ulysses", "hybrid"):  # queries stay, whoever brings the keys
        return task.share * pairs(task, rank)
    one = plan(schedule, task, rank, node_ranks)
    assert isinstance(one, ByHeads)
    near, far = near_and_far(task)
    found = 0 if near is None else task.share * pairs(near, rank)
    return found + sum(desk.share * _pairs_of(far, desk.queries, desk.kv_heads) for desk in one.desks if far)


def balance(task: Task, schedule: str = "ring", node_ranks: int | None = None) -> float:
    """The busiest rank's work over the mean: 1.0 is perfect."""
    work = [head_pairs(task, schedule, rank, node_ranks or task.ranks) for rank in range(task.ranks)]
    return max(work) * len(work) / sum(work) if any(work) else 1.0


def _pairs_of(task: Task, queries: Shard, kv_heads: range) -> int:
    """Of these positions and heads, over all keys. Of thousands of ranks few patterns could be cut into tiles."""
    problem, limits = task.problem, task.pattern.only_limits
    if limits is not None:
        positions = (moved(piece, problem.offset) for piece in queries)
        return problem.batch * len(kv_heads) * sum(_pairs_in_limits(piece, *limits, problem.n_k) for piece in positions)
    if _repeats(task):
        up_to = partial(_dilated_pairs, task, kv_heads)
        found = (up_to(x.start % x.step, x.step, x[-1] + 1) - up_to(x.start % x.step, x.step, x.start) for x in queries)
        return problem.batch * sum(found)
    tiles = _tiles_over_all_keys(task, queries)
    return sum(tile.pairs // len(tile.kv_heads) * len(meet(tile.kv_heads, kv_heads)) for tile in tiles)


def _pairs_in_limits(positions: range, lo: int | None, hi: int | None, n: int) -> int:
    """Of n keys."""
    total = n * len(positions) if hi is None else _keys_up_to(positions, hi, n)
    return total - (0 if lo is None else _keys_up_to(positions, lo - 1, n))


def _keys_up_to(positions: range, hi: int, n: int) -> int:
    """The sum of clamp(x + hi + 1, 0, n) over positions x: a slope, and all keys above it."""
    slope = meet(positions, range(-hi, n - hi - 1))
    above = meet(positions, range(n - hi - 1, max(n - hi - 1, positions.stop)))
    return n * len(above) + (len(slope) * (slope[0] + slope[-1] + 2 * hi + 2) // 2 if slope else 0)


@lru_cache(maxsize=256)
def _tiles_over_all_keys(task: Task, queries: Shard) -> tuple[Tile, ...]:
    """Once for all desks with the same rows."""
    return tiles_of(task, queries, (range(task.problem.n_k),))


def _repeats(task: Task) -> bool:
    """Whether segments repeat from position 0 on."""
    pattern, problem = task.pattern, task.problem
    return type(pattern) is Dilated and pattern.documents is None and problem.n_q == problem.n_k and not problem.offset


@lru_cache(maxsize=1 << 12)
def _dilated_pairs(task: Task, kv_heads: range, first: int, step: int, stop: int) -> int:
    """Of queries at first, first + step, ... before a position: in whole segments, and in the one it lies in."""
    pattern, n, found = task.pattern, task.problem.n_k, 0
    assert isinstance(pattern, Dilated)
    for w, r in pattern.branches:
        many, rest = divmod(stop, w)
        alike = step // gcd(w, step)  # so many segments further the same rows are among them
        segments = [(len(range(i, many, alike)), i * w, w, w) for i in range(min(alike, many))]
        segments.append((1, many * w, rest, min(w, n - many * w)))  # the last of all may be short
        for phase, heads in phases(task.problem.kv_heads, r, pattern.phase).items():
            for often, start, asking, length in segments:
                queries = meet(range((first - start) % step, asking, step), range(phase, asking, r))
                keys = range(phase, length, r)
                each = len(queries) * len(keys)
                if pattern.causal and queries:
                    each = len(queries) * (keys.index(queries[0]) + keys.index(queries[-1]) + 2) // 2
                found += len(meet(heads, kv_heads)) * often * each
    return found
