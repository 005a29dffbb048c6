"""What Triton compiles a kernel for: types and a few flags, never a length, a count or where a tensor begins."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from longring.kernels.places import Part, Place
from longring.numerics.online_softmax import Partial

triton = pytest.importorskip("triton", reason="needs the triton package")
backend = pytest.importorskip("triton.backends.nvidia.compiler").CUDABackend
specialized = pytest.importorskip("triton._C.libtriton").native_specialize_impl
parts = pytest.importorskip("longring.kernels.triton.parts")
tiles = pytest.importorskip("longring.kernels.triton.tiles")


class Recorded:
    """In place of a kernel: what it would have been compiled for at each launch."""

    def __init__(self, kernel: Any) -> None:
        self.signature = inspect.signature(kernel.fn)
        self._options = getattr(kernel, "kwargs", None) or vars(kernel)  # of the interpreter; of the compiler
        self.classes: set[tuple[Any, ...]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._launched

    def _launched(self, *args: Any, **kwargs: Any) -> None:
        names = self.signature.parameters
        given = self.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in names}).arguments
        self.classes.add(tuple((name, self._compiled_for(name, x)) for name, x in given.items()))

    def _compiled_for(self, name: str, x: Any) -> Any:
        annotation = str(self.signature.parameters[name].annotation)
        if "constexpr" in annotation:
            return x
        is_free = name in (self._options.get("do_not_specialize") or ())
        is_free_to_begin = name in (self._options.get("do_not_specialize_on_alignment") or ())
        found = specialized(backend, x, False, not is_free, not is_free_to_begin)
        return (annotation, found[1]) if "int" in annotation else found


@pytest.fixture
def recorded(monkeypatch):
    found = {}
    for module, names in ((parts, ("_merge", "_add")), (tiles, ("_forward", "_dq", "_dkv", "_terms"))):
        for name in names:
            found[name] = Recorded(getattr(module, name))
            monkeypatch.setattr(module, name, found[name])
    return found


def merged(n: int, count: int, *, batch: int = 1, starts: int = 0) -> None:
    """`count` parts of n rows each, of which the i-th one's lse begins i numbers past a multiple of 16 bytes."""
    rows, heads, d = range(n), 4, 64
    place = Place(range(batch), 1, 0, range(heads), 0, rows, 1)
    lse = [
        torch.empty(starts + count + batch * heads * n)[i : i + batch * heads * n]
        for i in range(starts, starts + count)
    ]
    made = [Part(place, torch.empty(batch, heads, n, d), one.view(batch, heads, n)) for one in lse]
    into = Partial(torch.empty(batch, n, heads, d), torch.empty(batch, heads, n))
    parts.merge_parts(made, range(n), None, into)
    parts.add_parts([part._replace(lse=None) for part in made], range(n), None, into.out)


@pytest.mark.parametrize("batch", [1, 3])
def test_merging_parts_of_any_length_that_begin_anywhere_is_compiled_once(recorded, batch):
    for n in (1000, 1001, 1024, 1, 16):
        for starts in (0, 1, 2):
            merged(n, 4, batch=batch, starts=starts)
    evens = {name: {dict(one)["EVEN"] for one in recorded[name].classes} for name in ("_merge", "_add")}
    assert all(len(recorded[name].classes) == len(evens[name]) for name in evens)


def test_each_power_of_two_of_parts_is_compiled_once(recorded):
    for count in range(1, 17):
        merged(1001, count)
    assert {dict(one)["COUNT"] for one in recorded["_merge"].classes} == {1, 2, 4, 8, 16}
    assert len(recorded["_merge"].classes) == len(recorded["_add"].classes) == 5


@pytest.mark.parametrize("heads", [(8, 2), (3, 1)])
def test_tiles_of_any_length_are_compiled_once(recorded, heads):
    from longring.geometry.packs import Whole, pack
    from longring.geometry.stacks import Stack

    for n in (1000, 1001, 1024, 33):
        q, k = (torch.empty(1, n, count, 64, dtype=torch.bfloat16) for count in heads)
        lse = torch.empty(1, heads[0], n)
        queries = Place(range(1), 1, 0, range(heads[1]), 0, range(n), heads[0] // heads[1])
        keys = Place(range(1), 1, 0, range(heads[1]), 0, range(n), 1)
        whole = Whole(1, range(n), heads[1], heads[0] // heads[1]), Whole(1, range(n), heads[1], 1)
        packed = pack([Stack(queries, keys, None, 0)], *whole)
        tiles.forward(q, k, k, packed, 0.125)
        tiles.backward(q, q, lse, None, q, k, k, packed, 0.125)
    assert {name: len(recorded[name].classes) for name in ("_forward", "_dq", "_dkv", "_terms")} == dict.fromkeys(
        ("_forward", "_dq", "_dkv", "_terms"), 1
    )
