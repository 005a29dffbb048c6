"""What kernels take while they compute: operands copied to be read, results, workspaces inside an operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import ArgumentError
from ...geometry.portions import SCORES_AT_ONCE, SIDE, has_most, portions, stretches
from ...geometry.stacks import Place, Stack
from ...geometry.tiles import Tile
from .room import Like, Room
from .totals import PARTS, Part, Seen, Sum

OPERANDS, GRADIENTS, WORKSPACE, DELTA = (
    "operands copied for the kernel",
    "partial gradients",
    "kernel workspace",
    "delta",
)


@dataclass(frozen=True)
class Kernel:
    """How a device computes stacks. `threads` of a CPU each have a workspace."""

    device: str
    name: str
    threads: int = 1

    @property
    def is_lazy(self) -> bool:
        """Whether parts wait to be merged, as they do on a GPU."""
        return self.device == "cuda"

    def look(self, room: Room, total: Seen, tiles: Sequence[Tile], q: Like, k: Like) -> None:
        """Compute tiles, and merge what they see."""
        if self.name == "reference":
            self._look_in_blocks(room, total, tiles, q, k)
            return
        slabs = stretches(tiles, q, k, can_be_done=total.can_be_done)
        for slab in slabs:
            found = tuple(portions(slab, q, k, is_first=total.is_empty, is_lazy=self.is_lazy))
            for stack in found:
                may_be_home = len(found) > 1 and self._writes_home(stack) and has_most(stack.queries, slab, q)
                part = self._attend(room, stack, q, is_home=may_be_home and total.home())
                total.add(part)
                part.give()
            if len(slabs) > 1:
                total.rows_done()

    def look_back(self, room: Room, dq: Sum, dk: Sum, dv: Sum, tiles: Sequence[Tile], q: Like, k: Like) -> None:
        """Compute the tiles' gradients, and add them to what there is."""
        if self.name == "reference":
            self._look_back_in_blocks(room, (dq, dk, dv), tiles, q, k)
            return
        sums = dq, dk, dv
        slabs = stretches(tiles, q, k, can_be_done=all(one.can_be_done for one in sums))
        for slab in slabs:
            is_first = all(one.is_empty for one in sums)
            found = tuple(portions(slab, q, k, is_first=is_first, is_lazy=self.is_lazy))
            for stack in found:
                may_be_home = len(found) > 1 and self._writes_home(stack) and all(one.can_be_done for one in sums)
                may_be_home = may_be_home and has_most(stack.queries, slab, q) and has_most(stack.keys, slab, k)
                homes = [may_be_home and one.home() for one in sums]
                parts = self._attend_backward(room, stack, q, homes)
                for one, part in zip(sums, parts, strict=True):
                    one.add(part)
                for part in parts:
                    part.give()
            if len(slabs) > 1:
                for one in sums:
                    one.rows_done()

    # ---- one stack

    def _writes_home(self, stack: Stack) -> bool:
        """Whether it can write into the result, what others found being merged into it."""
        return self.is_lazy and self.name == "flash_attn_4" and stack.shape != "flipped"

    def _attend(self, room: Room, stack: Stack, q: Like, *, is_home: bool) -> Part:
        rows, cols, d = *_sides(stack), q.d
        result = self._result(q)
        flipped = stack.shape == "flipped"
        operands = (q.itemsize if flipped else 0) + self._raised(q)
        with room.take(OPERANDS, operands * (rows + 2 * cols) * d):
            home = rows * d * result if is_home else 0
            out, lse = room.take(PARTS, rows * d * result - home), room.take(PARTS, rows * self._lse(q))
            room.briefly(WORKSPACE, self._workspace(stack, q))
        if flipped:
            room.briefly(PARTS, out.size + lse.size)
        return Part(stack.queries, out, lse, home)

    def _attend_backward(self, room: Room, stack: Stack, q: Like, are_home: Sequence[bool]) -> tuple[Part, Part, Part]:
        rows, cols, d = *_sides(stack), q.d
        result = self._result(q)
        flipped = stack.shape == "flipped"
        copies = (3 * rows + 2 * cols) * d * q.itemsize + rows * q.accumulator.itemsize
        with room.take(OPERANDS, copies if flipped else 0):
            with room.take(OPERANDS, self._raised(q) * (3 * rows + 2 * cols) * d):
                sizes = [size * d * result for size in (rows, cols, cols)]
                homes = [size if is_home else 0 for size, is_home in zip(sizes, are_home, strict=True)]
                taken = [room.take(GRADIENTS, size - home) for size, home in zip(sizes, homes, strict=True)]
                room.briefly(WORKSPACE, self._workspace_backward(stack, q))
            if flipped:
                room.briefly(GRADIENTS, sum(one.size for one in taken))
        places = stack.queries, stack.keys, stack.keys
        dq, dk, dv = (Part(place, one, None, home) for place, one, home in zip(places, taken, homes, strict=True))
        return dq, dk, dv

    def _result(self, q: Like) -> int:
        """Bytes of a number that an operation gives: a CPU computes in the accumulator's dtype, a GPU in q's."""
        return q.itemsize if self.is_lazy else q.accumulator.itemsize

    def _lse(self, q: Like) -> int:
        return 4 if self.is_lazy else q.accumulator.itemsize

    def _raised(self, q: Like) -> int:
        """Bytes of a number in a copy in the accumulator's dtype, where one is made."""
        return q.accumulator.itemsize if not self.is_lazy and q.itemsize < 4 else 0

    # ---- inside an operation

    def _workspace(self, stack: Stack, q: Like) -> int:
        if self.is_lazy:
            return 0
        rows, cols = _cpu_block(stack)
        return self.threads * rows * (cols + 2 + q.d) * q.accumulator.itemsize

    def _workspace_backward(self, stack: Stack, q: Like) -> int:
        if self.is_lazy:
            rows, _ = _sides(stack)
            return rows * (q.d + 3) * 4  # a float32 dq that blocks of columns add to; lse twice, and delta
        rows, cols = _cpu_block(stack)
        if not self.threads:
            return 0
        is_ready = self._raised(q) or stack.shape == "flipped" or _lies_in_order(stack.queries, q)
        own_dout = 0 if is_ready else _sides(stack)[0] * q.d  # the operation makes a dense copy
        return ((self.threads * 2 * cols + 1) * rows + own_dout) * q.accumulator.itemsize

    # ---- the reference kernel, block by block

    def _look_in_blocks(self, room: Room, total: Seen, tiles: Sequence[Tile], q: Like, k: Like) -> None:
        total.in_place()
        if tiles:
            room.briefly(WORKSPACE, _block(tiles, q, k))

    def _look_back_in_blocks(
        self, room: Room, sums: tuple[Sum, Sum, Sum], tiles: Sequence[Tile], q: Like, k: Like
    ) -> None:
        for one in sums:
            one.in_place()
        with room.take(DELTA, q.vectors * q.accumulator.itemsize):
            room.briefly(WORKSPACE, _block(tiles, q, k))


def _cpu_block(stack: Stack) -> tuple[int, int]:
    """Rows and columns that PyTorch's flash attention for the CPU has in a workspace at once."""
    rows, cols = len(stack.queries.rows), len(stack.keys.rows)
    return min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32), min(cols, 512)


def _lies_in_order(place: Place, x: Like) -> bool:
    """Whether the rows of the place, with all their heads, lie behind each other in x."""
    (many, heads, rows), (far, between, down), _ = place.strided(x.rows * x.heads, x.heads, 1)
    axes = (heads, between, 1), (rows, down, heads), (many, far, rows * heads)
    return all(size == 1 or stride == dense for size, stride, dense in axes)


def _sides(stack: Stack) -> tuple[int, int]:
    """Vectors of queries and of keys."""
    queries, keys = stack.queries, stack.keys
    return queries.many * queries.heads * len(queries.rows), keys.many * len(keys.kv_heads) * len(keys.rows)


def _block(tiles: Sequence[Tile], q: Like, k: Like) -> int:
    """Bytes of the largest block of the reference kernel: its scores four times over, and what they give its rows."""
    most = 0
    for tile in tiles:
        rows, cols = min(SIDE, len(tile.rows)), min(SIDE, len(tile.cols))
        each, many = rows * (q.heads // k.heads), len(tile.batch) * tile.repeat.count * len(tile.kv_heads)
        if each * cols * many > SCORES_AT_ONCE:
            many = max(1, min(len(tile.kv_heads), SCORES_AT_ONCE // (each * cols)))
        most = max(most, each * many * (4 * cols + q.d))
    return most * q.accumulator.itemsize


NAMES = {"cpu": ("auto", "sdpa", "reference")}


def kernel_for(device: str, name: str, threads: int) -> Kernel:
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"device must be cpu or cuda, got {device!r}")
    if device == "cpu" and name not in NAMES["cpu"]:
        raise ArgumentError(f"kernel must be one of {', '.join(NAMES['cpu'])} on a CPU, got {name!r}")
    return Kernel(device, name, threads)
