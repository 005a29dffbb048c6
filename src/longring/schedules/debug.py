"""LONGRING_DEBUG=1: every tile is computed alone and looked at, and the first nan or inf is named with its source."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor

from ..errors import NotFinite
from ..geometry.tiles import Tile
from ..kernels.contract import Upstream
from ..numerics.online_softmax import Partial
from .labels import Doing

VARIABLE = "LONGRING_DEBUG"


def is_debugging() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0")


def check_found(found: Partial, tile: Tile, q: Tensor, k: Tensor, v: Tensor, what: Doing) -> None:
    """Refuse to go on once out or lse has nan or inf; an lse of -inf is a row that saw nothing."""
    lse = found.lse
    if found.out.isfinite().all() and not (lse.isnan() | lse.isposinf()).any():
        return
    _raise(tile, {"q": (q, tile.rows), "k": (k, tile.cols), "v": (v, tile.cols)}, "out or lse", what)


def check_gradients(
    found: Sequence[Tensor], tile: Tile, upstream: Upstream, q: Tensor, k: Tensor, v: Tensor, what: Doing
) -> None:
    if all(x.isfinite().all() for x in found):
        return
    sources = {
        "q": (q, tile.rows),
        "k": (k, tile.cols),
        "v": (v, tile.cols),
        "the gradient of out": (upstream.dout, tile.rows),
        "out": (upstream.out, tile.rows),
    }
    _raise(tile, sources, "dq, dk or dv", what)


def _raise(tile: Tile, sources: dict[str, tuple[Tensor, range]], result: str, what: Doing) -> None:
    already = [
        f"{name} (row {row} here)" for name, (x, rows) in sources.items() if (row := _first(x, rows)) is not None
    ]
    why = f"already in {', '.join(already)}" if already else "although all that went into it is finite"
    raise NotFinite(
        f"{what}: nan or inf in {result} from the {tile.shape} tile of local rows {tile.rows} and columns {tile.cols}, "
        f"kv heads {tile.kv_heads}, batch rows {tile.batch}: {why}"
    )


def _first(x: Tensor, rows: range) -> int | None:
    """The first of these rows with a number that is not finite."""
    part = x[:, rows.start : rows.stop : rows.step]
    bad = (~part.isfinite()).any(-1).any(-1).any(0).nonzero()
    return rows[int(bad[0])] if len(bad) else None
