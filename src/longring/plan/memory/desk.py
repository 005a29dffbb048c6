"""Where a rank computes: its queries, and what has been found for them so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...geometry.tiles import Tile
from .kernels import Kernel
from .room import Like, Room
from .totals import Seen, Sum, repeat


@dataclass(frozen=True)
class Setting:
    """A rank's memory, and how it computes."""

    room: Room
    kernel: Kernel

    def seen(self, q: Like, *, is_one_look: bool = False) -> Seen:
        return Seen(self.room, q, is_lazy=self.kernel.is_lazy, is_one_look=is_one_look)

    def sum(
        self,
        x: Like,
        component: str,
        *,
        is_one_look: bool = False,
        memory: Callable[[], None] | None = None,
        is_lent: bool = False,
    ) -> Sum:
        lazy = self.kernel.is_lazy
        return Sum(self.room, x, component, is_lazy=lazy, is_one_look=is_one_look, memory=memory, is_lent=is_lent)


@dataclass
class Desk:
    """Queries of some heads, which read so many kv heads."""

    setting: Setting
    q: Like
    kv_heads: int
    total: Seen

    def after_step(self, skipped: int) -> None:
        """`skipped` steps between the last one and this were not walked."""
        repeat(self.setting.room, self.total, skipped)

    def look(self, tiles: Sequence[Tile], k: Like) -> None:
        if tiles:
            self.setting.kernel.look(self.setting.room, self.total, tiles, self.q, k._replace(heads=self.kv_heads))


@dataclass
class BackwardDesk:
    setting: Setting
    q: Like
    kv_heads: int
    dq: Sum

    def after_step(self, skipped: int) -> None:
        repeat(self.setting.room, self.dq, skipped)

    def look(self, tiles: Sequence[Tile], k: Like, dk: Sum, dv: Sum) -> None:
        if not tiles:
            return
        some = k._replace(heads=self.kv_heads)
        of_keys, of_values = dk.of_heads(self.kv_heads), dv.of_heads(self.kv_heads)
        self.setting.kernel.look_back(self.setting.room, self.dq, of_keys, of_values, tiles, self.q, some)
        of_keys.handed_back()
        of_values.handed_back()
