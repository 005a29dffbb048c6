"""The flash-attn packages, where they are installed: nothing of them is imported before it is used.

They take [many, rows, heads, d]. Their functions are called by keyword, and no version is called that is older than
the one whose signatures were read. flash-attn-4 compiles a kernel on the first call of its kind, for seconds, and
warns meanwhile of things that concern its authors.
"""

from __future__ import annotations

import importlib
import re
import warnings
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ...geometry.sequences import Window
from .contract import Homes, Rows
from .cuda import capability, not_for, not_on_cuda
from .sequences import Gradients, How, OfSequences

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


class _FlashAttn(OfSequences):
    """All of them compute the same thing, rows that see a window, and each is told so in its own words."""

    package: Package
    builds_plans = False

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

    def columns_for_dlse(self, head_dim: int) -> int:
        return 8 + -head_dim % 8

    @property
    def _functions(self) -> Any:
        return _loaded(self.package.module)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, How(scale, _window(causal)))

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._backward(rows, q, k, v, How(scale, _window(causal)))


@cache
def _in_order(kind: Any) -> Any:
    """One of each kind, since what was chosen is remembered by operation."""
    return kind(is_deterministic=True)


def _limits(q: Tensor, head_dim: int, *, least: tuple[int, int], most: int = 256) -> str | None:
    if head_dim % 8:
        return f"takes head dimensions in steps of 8, got {head_dim}"
    return not_for(q, head_dim, least=least, most=most, dtypes=_SIXTEEN_BITS)


def _window(causal: bool) -> Window:
    return Window(None, 0 if causal else None)


def _told(how: How, no_limit: int | None) -> dict[str, Any]:
    """Causal is aligned at the last row and the last column, as windows are."""
    causal = how.window == (None, 0)
    left, right = (no_limit if side is None or causal else side for side in how.window)
    told = {"softmax_scale": how.scale, "causal": causal, "window_size_left": left, "window_size_right": right}
    if how.sequences is None:
        return told
    of_queries, of_keys = how.sequences.tables.read()
    return {
        **told,
        "cu_seqlens_q": of_queries,
        "cu_seqlens_k": of_keys,
        "max_seqlen_q": how.sequences.longest_queries,
        "max_seqlen_k": how.sequences.longest_keys,
    }


def _gradients_of(*tensors: Tensor) -> dict[str, Tensor]:
    """Where to write them: what flash-attn 2 and 3 allocate themselves they do not return."""
    return {name: x.new_empty(x.shape) for name, x in zip(("dq", "dk", "dv"), tensors, strict=True)}


# ------------------------------------------------------------------------------------------------ one by one


_NOTHING_ELSE = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}


class FlashAttn2(_FlashAttn):
    """flash-attn 2, for Ampere and later. It wants to be told of everything: it has no defaults."""

    name = "flash_attn_2"
    package = Package("flash-attn", "flash_attn.flash_attn_interface", "2.8.0", "pip install -U flash-attn")
    limits_want_keys = True
    counts_to_two_billion = True

    def _limits(self, q: Tensor, head_dim: int) -> str | None:
        return _limits(q, head_dim, least=(8, 0))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        functions = self._functions
        forward = functions._flash_attn_varlen_forward if how.sequences else functions._flash_attn_forward
        out, lse, *_ = forward(q, k, v, return_softmax=False, **_told(how, -1), **_NOTHING_ELSE)
        return out, lse

    def _attend_backward(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, how: How) -> Gradients:
        functions = self._functions
        backward = functions._flash_attn_varlen_backward if how.sequences else functions._flash_attn_backward
        grads = _gradients_of(q, k, v)
        told = {"deterministic": self.is_deterministic, **_told(how, -1), **_NOTHING_ELSE}
        backward(rows.dout, q, k, v, rows.out, rows.lse, **grads, **told)
        return grads["dq"], grads["dk"], grads["dv"]


FLAGS = "flash_attn_config"  # the module that says how flash-attn 3 was built


class FlashAttn3(_FlashAttn):
    """flash-attn 3, for Hopper alone. Whoever builds it may leave out head dimensions, windows and more."""

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
        return _broken(FLAGS) or self._left_out(q.dtype, head_dim)

    def _left_out(self, dtype: torch.dtype, head_dim: int) -> str | None:
        without = self._build_flags()
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

    def _build_flags(self) -> dict[str, bool]:
        return _loaded(FLAGS).CONFIG["build_flags"]

    def takes_many(self, has_dlse: bool) -> bool:
        without = self._build_flags()
        is_able = not any(without[f"FLASHATTENTION_DISABLE_{name}"] for name in ("LOCAL", "VARLEN"))
        return is_able and super().takes_many(has_dlse)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._functions._flash_attn_forward(q, k, v, **_told(how, -1))
        return out, lse

    def _attend_backward(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, how: How) -> Gradients:
        grads = _gradients_of(q, k, v)
        told = _told(how, -1)
        told["is_causal"] = told.pop("causal")
        given = rows.dout, q, k, v, rows.out, rows.lse
        self._functions._flash_attn_backward(*given, **grads, deterministic=self.is_deterministic, **told)
        return grads["dq"], grads["dk"], grads["dv"]


class FlashAttn4(_FlashAttn):
    """flash-attn-4, written in CuTe, for Hopper and later. It takes the gradient of lse as it is.

    It asks the current device what it is and for a stream, whatever device the tensors are on.
    """

    name = "flash_attn_4"
    package = Package("flash-attn-4", "flash_attn.cute.interface", "4.0.0b36", "pip install longring[flash]")
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

    def takes_many(self, has_dlse: bool) -> bool:
        return True

    def forward_into(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        return self._forward(q, k, v, How(scale, _window(causal), into={"out": out.transpose(1, 2)}))[1]

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
        into = {name: x.transpose(1, 2) for name, x in named if x is not None}
        return self._backward(rows, q, k, v, How(scale, _window(causal), into=into))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        told = {"return_lse": True, **_told(how, None), **(how.into or {})}
        with torch.cuda.device_of(q):
            out, lse, *_ = self._functions._flash_attn_fwd(q, k, v, **told)
        return out, lse

    def _attend_backward(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, how: How) -> Gradients:
        told = {"deterministic": self.is_deterministic, "dlse": rows.dlse, **_told(how, None), **(how.into or {})}
        given = q, k, v, rows.out, rows.dout, rows.lse
        with torch.cuda.device_of(q):
            dq, dk, dv, *_ = self._functions._flash_attn_bwd(*given, **told)
        return dq, dk, dv
