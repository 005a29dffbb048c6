"""What runs in a model: float64 throughout, and attention by torch's own means seen where longring is not asked."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
from tiny_configs import TOKENS
from torch.overrides import TorchFunctionMode

from longring.integrations import transformers as integration

_attention = integration.attention
_here = threading.local()
_calls: Counter[int] = Counter()


def _counted(*given: Any, **options: Any) -> Any:
    _calls[0] += 1
    _here.within = getattr(_here, "within", 0) + 1
    try:
        return _attention(*given, **options)
    finally:
        _here.within -= 1


integration.attention = _counted


def calls() -> int:
    """How often models have come to longring."""
    return _calls[0]


SOFTMAX = {torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax}
FUSED = {torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.multi_head_attention_forward}


class Watch(TorchFunctionMode):
    """Norms and the like round to float32 in between, where the last bit of float64 may tip the scales: not here."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(_here, "within", 0):
            return func(*args, **kwargs)
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if any(x is torch.float32 for x in args):
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func in FUSED:
            self.elsewhere[func.__name__] += 1
        elif func in SOFTMAX and _are_scores(args[0]):
            self.elsewhere["softmax"] += 1
        return func(*args, **kwargs)


def _are_scores(x: Any) -> bool:
    """Of as many keys as queries, not of experts or classes."""
    return isinstance(x, torch.Tensor) and x.ndim >= 3 and x.shape[-1] == x.shape[-2] >= TOKENS // 2
