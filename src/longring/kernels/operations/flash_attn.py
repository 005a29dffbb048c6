"""The flash-attn packages, where they are installed: nothing of them is imported before it is used.

They take [many, rows, heads, d]. Their functions are called by keyword, and no version is called that is older than
the one whose signatures were read. flash-attn-4 compiles a kernel on the first call of its kind, for seconds, and
warns meanwhile of things that concern its authors.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ...geometry.packs import Pack, Whole
from ...geometry.sequences import Window, common_window, in_sequence
from ..places import Stack
from .contract import Homes, Rows
from .cuda import capability, not_for, not_on_cuda
from .sequences import Sequences, by_batch, in_a_row, sequences, terms_by_batch, terms_in_a_row

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)

# ------------------------------------------------------------------------------------------- what is installed


class Package(NamedTuple):
    name: str  # as pip knows it
    module: str  # which has the functions
    least: str  # the oldest version whose signatures are those used here
    install: str

    def refusal(self) -> str | None:
        """Why it cannot be called, found without importing it: flash-attn and flash-attn-4 share one folder."""
        if not is_there(self.module):
            return f"needs the package {self.name}, which is not installed ({self.install})"
        has = _version_of(self.name)
        if has is None:
            return f"needs {self.name} {self.least} or later, and the version of what is installed is not recorded"
        if _age(has) < _age(self.least):
            return f"needs {self.name} {self.least} or later, and {has} is installed ({self.install})"
        return None


@cache
def is_there(module: str) -> bool:
    """Whether the module's file is installed, found without importing any package above it."""
    package, *inside = module.split(".")
    found = find_spec(package)
    if found is None or not inside:
        return found is not None
    places = found.submodule_search_locations or []
    return any(Path(place, *inside).with_suffix(".py").exists() for place in places)


@cache
def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _age(version: str) -> tuple[tuple[int, ...], str, int]:
    """So that 4.0.0b9 < 4.0.0b36 < 4.0.0rc1 < 4.0.0 < 4.0.1."""
    found = re.match(r"(\d+(?:\.\d+)*)(?:\.?(a|b|rc)(\d+))?", version)
    if found is None:
        return (0,), "", 0
    release, stage, number = found.groups()
    return tuple(map(int, release.split("."))), stage or "released", int(number or 0)


@cache
def _loaded(module: str) -> Any:
    for message in (
        r"Argument \w+ \(position \d+\) cannot be converted",
        r"cutlass\.",
        r"warpgroup\.",
        "Arch from arch",
    ):
        warnings.filterwarnings("ignore", message)  # here, as they come whenever a new kind of kernel is compiled
    return importlib.import_module(module)


@cache
def _broken(module: str) -> str | None:
    """Compiled for another PyTorch, a package is installed and cannot be imported."""
    try:
        _loaded(module)
    except (ImportError, OSError) as error:
        return f"is installed, but {module} cannot be imported: {error}"
    return None


# ---------------------------------------------------------------------------------------------- what is common


class _FlashAttn:
    package: Package

    def __init__(self, *, is_deterministic: bool = False) -> None:
        self.is_deterministic = is_deterministic

    def with_the_same_bits(self) -> Self:
        return self if self.is_deterministic else _in_order(type(self))

    def refusal(self, q: Tensor, head_dim: int) -> str | None:
        return not_on_cuda(q) or self.package.refusal() or self._limits(q, head_dim) or _broken(self.package.module)

    def _limits(self, q: Tensor, head_dim: int) -> str | None:
        raise NotImplementedError

    def takes(self, rows: int, cols: int) -> bool:
        return True

    @property
    def _functions(self) -> Any:
        return _loaded(self.package.module)


@cache
def _in_order(kind: Any) -> Any:
    """One of each kind, since what was chosen is remembered by operation."""
    return kind(is_deterministic=True)


def _limits(q: Tensor, head_dim: int, *, least: tuple[int, int], most: int = 256) -> str | None:
    if head_dim % 8:
        return f"takes head dimensions in steps of 8, got {head_dim}"
    return not_for(q, head_dim, least=least, most=most, dtypes=_SIXTEEN_BITS)


def _rows_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _heads_first(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _gradients_of(*tensors: Tensor) -> dict[str, Tensor]:
    """Where to write them: what flash-attn 2 and 3 allocate themselves they do not return."""
    return {name: x.new_empty(x.shape) for name, x in zip(("dq", "dk", "dv"), tensors, strict=True)}


# ------------------------------------------------------------------------------------------------ one by one


_NOTHING_ELSE = {  # which flash-attn 2 wants to be told: it has no defaults
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}


class FlashAttn2(_FlashAttn):
    """flash-attn 2, for Ampere and later."""

    name = "flash_attn_2"
    package = Package("flash-attn", "flash_attn.flash_attn_interface", "2.7.0", "pip install -U flash-attn")

    def _limits(self, q: Tensor, head_dim: int) -> str | None:
        return _limits(q, head_dim, least=(8, 0))

    def columns_for_dlse(self, head_dim: int) -> int:
        return 8 + -head_dim % 8

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._functions._flash_attn_forward(
            *_rows_first(q, k, v), causal=causal, softmax_scale=scale, return_softmax=False, **_NOTHING_ELSE
        )
        return out.transpose(1, 2), lse

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = _rows_first(rows.dout, q, k, v, rows.out)
        found = _gradients_of(q, k, v)
        self._functions._flash_attn_backward(
            *(dout, q, k, v, out, rows.lse.float().contiguous()),
            **found,
            causal=causal,
            softmax_scale=scale,
            deterministic=self.is_deterministic,
            **_NOTHING_ELSE,
        )
        return _heads_first(**found)


class FlashAttn3(_FlashAttn):
    """flash-attn 3, for Hopper alone. Whoever builds it may leave out head dimensions, float16 and the backward."""

    name = "flash_attn_3"
    package = Package(
        "flash_attn_3",
        "flash_attn_interface",
        "3.0.0",
        "it is built from the folder hopper of github.com/Dao-AILab/flash-attention",
    )

    def _limits(self, q: Tensor, head_dim: int) -> str | None:
        if (reason := _limits(q, head_dim, least=(9, 0))) is not None:
            return reason
        if (has := capability(q.device))[0] != 9:
            return f"computes on Hopper (9.x) only, and {q.device} has {has[0]}.{has[1]}"
        return self._left_out(q.dtype, head_dim)

    def _left_out(self, dtype: torch.dtype, head_dim: int) -> str | None:
        without = _loaded("flash_attn_config").CONFIG["build_flags"]
        if without["FLASHATTENTION_DISABLE_BACKWARD"]:
            return "was built without its backward pass"
        if dtype == torch.float16 and without["FLASHATTENTION_DISABLE_FP16"]:
            return "was built without float16"
        built = [d for d in (64, 96, 128, 192, 256) if not without[f"FLASHATTENTION_DISABLE_HDIM{d}"]]
        if self.is_deterministic:  # computed as the next that was built, and at 256 there is no such thing
            built = [d for d in built if d < 256]
        if head_dim > (most := max(built, default=0)):
            how = ", the same bits from run to run," if self.is_deterministic else ""
            return f"as it was built{how} takes a head dimension of at most {most}, got {head_dim}"
        return None

    def columns_for_dlse(self, head_dim: int) -> int:
        return 8 + -head_dim % 8

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._functions._flash_attn_forward(*_rows_first(q, k, v), causal=causal, softmax_scale=scale)
        return out.transpose(1, 2), lse

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = _rows_first(rows.dout, q, k, v, rows.out)
        found = _gradients_of(q, k, v)
        self._functions._flash_attn_backward(
            *(dout, q, k, v, out, rows.lse.float().contiguous()),
            **found,
            is_causal=causal,
            softmax_scale=scale,
            deterministic=self.is_deterministic,
        )
        return _heads_first(**found)


class FlashAttn4(_FlashAttn):
    """flash-attn-4, written in CuTe, for Hopper and later. It takes the gradient of lse as it is."""

    name = "flash_attn_4"
    package = Package("flash-attn-4", "flash_attn.cute.interface", "4.0.0b36", "pip install longring[flash]")
    takes_anything = False  # many sequences of one window, and any single band
    right_for = (64, 128, 256)  # seen on an H200 with 4.0.0b36: gradients of 8, 16 and 72 were wrong

    def _limits(self, q: Tensor, head_dim: int) -> str | None:
        """After Hopper it knows 256 as well, but no gradient of lse there."""
        major = capability(q.device)[0] if q.device.type == "cuda" else 0
        if self.is_deterministic and major == 12:
            return f"adds up in any order on compute capability 12.x, which {q.device} has"
        if (reason := _limits(q, head_dim, least=(9, 0), most=128 if major > 9 else 256)) is not None:
            return reason
        if head_dim not in self.right_for:
            return f"is used for heads of 64, 128 and 256, got {head_dim}: of some others it gave wrong gradients"
        return None

    def columns_for_dlse(self, head_dim: int) -> int:
        return 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, scale, causal=causal)

    def forward_into(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        return self._forward(q, k, v, scale, causal=causal, out=out.transpose(1, 2))[1]

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, **told: Any) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._functions._flash_attn_fwd(
            *_rows_first(q, k, v), softmax_scale=scale, return_lse=True, **told
        )
        return out.transpose(1, 2), lse

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.backward_into((None, None, None), rows, q, k, v, causal, scale)

    def backward_into(
        self,
        homes: Homes,
        rows: Rows,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        named = zip(("dq", "dk", "dv"), homes, strict=True)
        given = {name: x.transpose(1, 2) for name, x in named if x is not None}
        return self._backward(rows, q, k, v, scale, causal=causal, **given)

    def _backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, scale: float, **told: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv, *_ = self._functions._flash_attn_bwd(
            *_rows_first(q, k, v, rows.out, rows.dout),
            rows.lse.float().contiguous(),
            softmax_scale=scale,
            deterministic=self.is_deterministic,
            dlse=None if rows.dlse is None else rows.dlse.float().contiguous(),
            **told,
        )
        return _heads_first(dq, dk, dv)

    # -------------------------------------------------------------------------------- windows, and many sequences

    def in_packs(self, stacks: Sequence[Stack], queries: Whole, keys: Whole) -> list[Pack]:
        return in_sequence(stacks, queries, keys)

    def forward_many(self, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float) -> list[tuple[Tensor, Tensor]]:
        (tray,) = pack.queries.trays
        if not tray.is_shared:
            (stack,) = pack.stacks
            views = stack.queries.view(q), stack.keys.view(k), stack.keys.view(v)
            return [self._forward(*views, scale, **_told(common_window(pack.stacks)))]
        (of_keys,) = pack.keys.trays
        out, lse, *_ = self._functions._flash_attn_fwd(
            in_a_row(q, tray.place),
            *(in_a_row(x, of_keys.place) for x in (k, v)),
            softmax_scale=scale,
            return_lse=True,
            **_told_of(sequences(pack, q.device)),
        )
        return [(by_batch(out, tray.place), terms_by_batch(lse, tray.place))]

    def backward_many(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        (tray,), (of_keys,) = pack.queries.trays, pack.keys.trays
        dlse = rows.dlse
        if not tray.is_shared:
            (stack,) = pack.stacks
            of, at = stack.queries.view, stack.queries.row_view
            mine = Rows(of(rows.dout), of(rows.out), at(rows.lse), None if dlse is None else at(dlse))
            views = of(q), stack.keys.view(k), stack.keys.view(v)
            dq, dk, dv = self._backward(mine, *views, scale, **_told(common_window(pack.stacks)))
            return [dq], [dk], [dv]
        dq, dk, dv, *_ = self._functions._flash_attn_bwd(
            in_a_row(q, tray.place),
            *(in_a_row(x, of_keys.place) for x in (k, v)),
            *(in_a_row(x, tray.place) for x in (rows.out, rows.dout)),
            terms_in_a_row(rows.lse, tray.place),
            softmax_scale=scale,
            deterministic=self.is_deterministic,
            dlse=None if dlse is None else terms_in_a_row(dlse, tray.place),
            **_told_of(sequences(pack, q.device)),
        )
        return [by_batch(dq, tray.place)], [by_batch(dk, of_keys.place)], [by_batch(dv, of_keys.place)]


def _told(window: Window) -> dict[str, Any]:
    if window.left is None and window.right in (None, 0):
        return {"causal": window.right == 0}
    return {"window_size_left": window.left, "window_size_right": window.right}


def _told_of(found: Sequences) -> dict[str, Any]:
    of_queries, of_keys = found.tables.read()
    return {
        "cu_seqlens_q": of_queries,
        "cu_seqlens_k": of_keys,
        "max_seqlen_q": found.longest_queries,
        "max_seqlen_k": found.longest_keys,
        **_told(found.window),
    }
