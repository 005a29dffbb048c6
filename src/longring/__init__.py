"""Exact attention over very long sequences: ring attention and LongNet dilated attention."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import models as models
    from . import nn as nn
    from .errors import ArgumentError as ArgumentError
    from .errors import CheckpointError as CheckpointError
    from .errors import DataChanged as DataChanged
    from .errors import Disagreement as Disagreement
    from .errors import HeadsForTokens as HeadsForTokens
    from .errors import KernelRefusal as KernelRefusal
    from .errors import LayoutError as LayoutError
    from .errors import LongringError as LongringError
    from .errors import NotBuilt as NotBuilt
    from .errors import NotFinite as NotFinite
    from .errors import PatternError as PatternError
    from .errors import PeerLost as PeerLost
    from .errors import RankFailed as RankFailed
    from .errors import RowsLeftOut as RowsLeftOut
    from .errors import ScheduleRefusal as ScheduleRefusal
    from .errors import TransportError as TransportError
    from .factory import create_dilated_attention as create_dilated_attention
    from .factory import create_multihead_dilated_attention as create_multihead_dilated_attention
    from .factory import create_ring_attention as create_ring_attention
    from .functional import attention as attention
    from .functional import dilated_attention as dilated_attention
    from .functional import explain as explain
    from .functional import ring_attention as ring_attention
    from .geometry.head_split import HeadSplit as HeadSplit
    from .geometry.patterns import Dense as Dense
    from .geometry.patterns import Dilated as Dilated
    from .launching import launch as launch
    from .schedules.buffers import release_buffers as release_buffers
    from .sharding import Sharding as Sharding
    from .simulation import simulate as simulate

__version__ = "0.1.0"

_HOMES = {
    "ArgumentError": "errors",
    "CheckpointError": "errors",
    "DataChanged": "errors",
    "Dense": "geometry.patterns",
    "Dilated": "geometry.patterns",
    "Disagreement": "errors",
    "HeadSplit": "geometry.head_split",
    "HeadsForTokens": "errors",
    "KernelRefusal": "errors",
    "LayoutError": "errors",
    "LongringError": "errors",
    "NotBuilt": "errors",
    "NotFinite": "errors",
    "PatternError": "errors",
    "PeerLost": "errors",
    "RankFailed": "errors",
    "RowsLeftOut": "errors",
    "ScheduleRefusal": "errors",
    "Sharding": "sharding",
    "TransportError": "errors",
    "attention": "functional",
    "create_dilated_attention": "factory",
    "create_multihead_dilated_attention": "factory",
    "create_ring_attention": "factory",
    "dilated_attention": "functional",
    "explain": "functional",
    "launch": "launching",
    "release_buffers": "schedules.buffers",
    "ring_attention": "functional",
    "simulate": "simulation",
}


_ROOMS = ("models", "nn")


def __getattr__(name: str) -> Any:
    """Import on first use, so that planning and `--help` never wait for torch."""
    from importlib import import_module

    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'longring' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_ROOMS})
