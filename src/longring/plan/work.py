"""How much each rank computes."""

from ..geometry.task import Task, runs_over_sources


def pairs(task: Task, rank: int) -> int:
    """(batch row, kv head, query, key) quadruples that `rank` computes; times heads / kv_heads for query heads."""
    return sum(len(run.ranks) * sum(tile.pairs for tile in run.tiles) for run in runs_over_sources(task, rank))


def balance(task: Task) -> float:
    """The busiest rank's work over the mean: 1.0 is perfect."""
    work = [pairs(task, rank) for rank in range(task.ranks)]
    return max(work) * len(work) / sum(work) if any(work) else 1.0
