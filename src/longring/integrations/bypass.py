"""Notices models of Transformers whose attention does not go through longring, by forward hooks on every module.

Within `sharded` each forward of a model, of a layer and of an attention module is followed. One that ends and has not
called longring has mixed the tokens of this rank alone. Compiled code runs no hooks: of it, only what a compiled model
as a whole has asked for is seen.
"""

from __future__ import annotations

import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

ATTENTION = re.compile(r"Attention\d*$")


class _Forward:
    """A forward under way."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.is_model = module, _is_model(module)
        self.has_attended = self.has_asked = self.is_traced = False


class Forwards:
    """The forwards under way in one `sharded` context, from the outermost to the innermost.

    refuse:  is called with the outermost model, and the path in it of what did not call longring.
    """

    def __init__(self, refuse: Callable[[nn.Module, str], NoReturn]) -> None:
        self._refuse, self._open = refuse, list[_Forward]()

    def attended(self) -> None:
        """Longring computes attention for all that is under way."""
        if not torch.compiler.is_compiling():
            for forward in self._open:
                forward.has_attended = True

    def asked(self) -> None:
        """A model has asked longring for a mask, which no other attention can use."""
        for forward in self._open:
            forward.has_asked = forward.has_asked or forward.is_model

    def begin(self, module: nn.Module, is_traced: bool = False) -> None:
        forward = _Forward(module)
        forward.is_traced = is_traced
        if self._open or forward.is_model or _is_of_transformers(type(module)):
            self._open.append(forward)

    def end(self, module: nn.Module, has_raised: bool) -> None:
        """After an error nothing is said: it may have come before any attention."""
        place = max((i for i, forward in enumerate(self._open) if forward.module is module), default=None)
        if place is None:
            return
        forward, above = self._open[place], self._open[:place]
        models = [each.module for each in above if each.is_model]
        del self._open[place:]  # those further in were interrupted, and ended without a hook
        if has_raised or forward.has_attended:
            return
        if forward.has_asked and (models or forward.is_traced or any(map(_is_compiled, module.modules()))):
            return  # what is compiled calls longring unseen; else who asks for a mask attends
        if isinstance(module, (PreTrainedModel, OptimizedModule)) and (models or not forward.is_model):
            return  # a part of a model need not attend; if it does, its attention modules tell
        if any(each.has_attended and ATTENTION.search(type(each.module).__name__) for each in above):
            return  # it works on what attention gave
        if not forward.is_model and any(map(_is_compiled, module.modules())):
            return  # what is compiled calls longring unseen; the model as a whole tells
        module = _uncompiled(module)
        model = _uncompiled(models[0]) if models else module
        self._refuse(model, next((name for name, each in model.named_modules() if each is module), ""))


def _uncompiled(module: nn.Module) -> nn.Module:
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def _is_compiled(module: nn.Module) -> bool:
    calls = getattr(module, "_compiled_call_impl", None), getattr(module.forward, "_torchdynamo_orig_callable", None)
    return isinstance(module, OptimizedModule) or calls != (None, None)


def _is_model(module: nn.Module) -> bool:
    if isinstance(module, OptimizedModule):
        return any(isinstance(part, PreTrainedModel) for part in module.modules())
    return isinstance(module, PreTrainedModel)


@functools.cache
def _is_of_transformers(kind: type) -> bool:
    return any(base.__module__.startswith("transformers.") for base in kind.__mro__)


@functools.cache
def _is_followed(kind: type) -> bool:
    is_layer = issubclass(kind, (PreTrainedModel, GradientCheckpointingLayer, OptimizedModule))
    return is_layer or bool(ATTENTION.search(kind.__name__))


# ------------------------------------------------------------------------------------------------------------- hooks

_current: ContextVar[Forwards | None] = ContextVar("longring.integrations.bypass", default=None)
_lock = threading.Lock()
_contexts = 0
_hooks: list[Any] = []
_names = list[int]()  # of the hooks in the tables of PyTorch: the same in every context, see `_under_their_names`


@contextmanager
def watching(forwards: Forwards) -> Iterator[None]:
    """Follow the forwards of this thread. The hooks are there as long as any thread follows some."""
    _hook(+1)
    before = _current.set(forwards)
    try:
        yield
    finally:
        _current.reset(before)
        _hook(-1)


def _hook(change: int) -> None:
    global _contexts
    with _lock:
        _contexts += change
        if _contexts and not _hooks:
            _hooks.append(nn.modules.module.register_module_forward_pre_hook(_begun))
            _hooks.append(nn.modules.module.register_module_forward_hook(_ended, always_call=True))
            _under_their_names()
        while _hooks and not _contexts:
            _hooks.pop().remove()
        if change > 0:
            _allow_hooks_around_compiled_models()


def _under_their_names() -> None:
    """Compiled code guards on the keys of the hooks, and would be compiled anew in every context that has new ones."""
    if not _names:
        _names.extend(handle.id for handle in _hooks)
    for handle, name in zip(_hooks, _names, strict=True):
        for table in (handle.hooks_dict_ref(), *(extra() for extra in handle.extra_dict_ref)):
            if handle.id in table and handle.id != name:
                table[name] = table.pop(handle.id)
        handle.id = name


def _begun(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        if isinstance(module, PreTrainedModel):
            _begun_in_compiled_code(module, args)
        return
    forwards = _current.get()
    if forwards is not None and _is_followed(type(module)):
        forwards.begin(module)


def _ended(module: nn.Module, args: Any, output: Any) -> None:
    """Also called if the forward raised, without an output then."""
    if torch.compiler.is_compiling():
        if isinstance(module, PreTrainedModel):
            _ended_in_compiled_code(module, args, output)
        return
    forwards = _current.get()
    if forwards is not None and _is_followed(type(module)):
        forwards.end(module, has_raised=output is None)


def _begun_traced(module: nn.Module, args: Any) -> None:
    forwards = _current.get()
    if forwards is not None:
        forwards.begin(module, is_traced=True)


_uncompiled_call: Any = torch.compiler.disable
_begun_in_compiled_code, _ended_in_compiled_code = _uncompiled_call(_begun_traced), _uncompiled_call(_ended)


COMPILED = r"Using `torch.compile\(module\)` when there are global hooks"


def _allow_hooks_around_compiled_models() -> None:
    """PyTorch warns that they run once more for a compiled model, which is what makes it seen here."""
    if not any(
        each[0] == "ignore" and each[1] is not None and each[1].pattern == COMPILED for each in warnings.filters
    ):
        warnings.filterwarnings("ignore", message=COMPILED, category=UserWarning)
