"""Checkpoints that somebody forged, tampered with or broke, and what reading them does to the process that reads.

    python tests/train/checkpoint_attacks.py --random 1000 --seed 3      # all of them, and so many more at random

Each attack changes the newer of two checkpoints. All but those called "tampered" give it right checksums afterwards:
`find` takes it, and loading must refuse it. A line for each says what came of it; the exit code is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from checkpoint_programs import loaded, saved, state_of

import longring as lr
from longring.train import checkpoints

NEWER, MARK = "step-00000002", "mark"  # what an attack leaves where it runs is a folder of this name
MOST_MEMORY = 400 << 20  # bytes that refusing takes at most: the largest file of an attack has 20 MB
MOST_SECONDS = 20.0  # of a core: far more than any takes
RAW = re.compile(r"\b[A-Z]\w*(Error|Exception|Exit|Interrupt)\b|Traceback|<[\w.]+ object at")
REFUSED, LOADED, ANY = "refused", "loaded", "any"


class Attack(NamedTuple):
    """What is done to the folder of a checkpoint; afterwards it must be refused, skipped by `find`, or what it may."""

    name: str
    change: Callable[[Path], Any]
    must: str = REFUSED


# ------------------------------------------------------------------------------------------------ words of pickles

P2, P4 = b"\x80\x02", b"\x80\x04"
METADATA, FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"


def s(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return b"X" + struct.pack("<I", len(raw)) + raw


def g(module: str, name: str) -> bytes:
    return s(module) + s(name) + b"\x93"


def i(number: int) -> bytes:
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def t(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def d(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def new(name: str, *pairs: tuple[bytes, bytes], module: str = METADATA) -> bytes:
    return g(module, name) + b")\x81" + d(*pairs) + b"b"


def size(*numbers: bytes) -> bytes:
    return g("torch", "Size") + t(t(*numbers)) + b"R"


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return P4 + g(module, name) + t(*arguments) + b"R."


def metadata(described: bytes, paths: bytes, places: bytes, *more: tuple[bytes, bytes]) -> bytes:
    parts = [("state_dict_metadata", described), ("planner_data", paths), ("storage_data", places)]
    return P4 + new("Metadata", *((s(name), part) for name, part in parts), *more) + b"."


def tensor(whole: bytes, chunks: bytes, dtype: bytes | None = None, layout: bytes | None = None) -> bytes:
    dtype, layout = dtype or g("torch", "float32"), layout or s("torch.strided")
    kept = g("torch.serialization", "_get_layout") + t(layout) + b"R"
    memory = g(METADATA, "_MEM_FORMAT_ENCODING") + t(i(0)) + b"R"
    properties = g(METADATA, "TensorProperties") + b")\x81" + t(dtype, kept, b"\x89", memory, b"\x89") + b"b"
    return new("TensorStorageMetadata", (s("properties"), properties), (s("size"), whole), (s("chunks"), chunks))


def chunk(offsets: bytes, sizes: bytes) -> bytes:
    return new("ChunkStorageMetadata", (s("offsets"), offsets), (s("sizes"), sizes))


def key(name: bytes, offset: bytes = b"N", hint: bytes = b"N") -> bytes:
    return new("MetadataIndex", (s("fqn"), name), (s("index"), hint), (s("offset"), offset))


def place(path: bytes, offset: bytes, length: bytes, *more: tuple[bytes, bytes]) -> bytes:
    fields = (s("relative_path"), path), (s("offset"), offset), (s("length"), length), *more
    return new("_StorageInfo", *fields, module=FILES)


DATA = s("__0_0.distcp")


def one(
    path: bytes = DATA,
    offset: bytes = b"K\0",
    length: bytes = b"K\1",
    whole: bytes | None = None,
    at: bytes | None = None,
    name: bytes = s("a"),
    names: bytes | None = None,
    more: tuple[tuple[bytes, bytes], ...] = (),
    **words: bytes,
) -> bytes:
    """The index of one tensor of two numbers, but for what is said otherwise."""
    whole, at = whole or size(i(2)), at or size(i(0))
    described = tensor(whole, b"](" + chunk(at, whole) + b"e", **words)
    where = place(path, offset, length, *more)
    return metadata(d((name, described)), d((name, names or t(name))), d((key(name, at, b"K\0"), where)))


# ------------------------------------------------------------------------------------------------- forged indices


def code(mark: Path) -> Iterator[tuple[str, bytes]]:
    """Pickles that run something, or come near it; most leave a mark in torch's own reader."""
    where, script = s(str(mark)), s(f"import os; os.mkdir({str(mark)!r})")
    for module, name, argument in [
        ("builtins", "eval", s(f"__import__('os').mkdir({str(mark)!r})")),
        ("builtins", "exec", script),
        ("posix", "mkdir", where),
        ("os", "mkdir", where),
        ("os", "makedirs", where),
        ("os", "system", s(f"mkdir {mark}")),
        ("posix", "system", s(f"mkdir {mark}")),
        ("os", "popen", s(f"mkdir {mark}")),
        ("subprocess", "check_call", t(s("mkdir"), where)),
        ("subprocess", "Popen", t(s("mkdir"), where)),
        ("pathlib", "Path", where),
        ("builtins", "__import__", s("antigravity")),
        ("importlib", "import_module", s("antigravity")),
        ("runpy", "run_path", where),
        ("pickle", "loads", s("cos\nsystem\n.")),
        ("torch", "load", where),
        ("torch.serialization", "load", where),
        ("torch.hub", "load", where),
        ("torch.jit", "load", where),
        ("numpy", "load", where),
        ("builtins", "open", where),
        ("builtins", "getattr", where),
        ("builtins", "setattr", where),
        ("operator", "attrgetter", s("a.b")),
        ("functools", "partial", where),
        ("types", "FunctionType", where),
        ("copyreg", "_reconstructor", where),
        ("codecs", "decode", where),
        ("builtins", "bytearray", i(1 << 34)),
        ("builtins", "bytes", i(1 << 34)),
        ("torch", "zeros", i(1 << 34)),
        ("torch", "empty", i(1 << 40)),
        (METADATA, "Metadata.__init__", where),
        (METADATA, "os.mkdir", where),
        (FILES, "os.mkdir", where),
        ("torch", "serialization.os.mkdir", where),
        ("longring.train.checkpoints", "save", where),
        ("sys", "exit", i(3)),
    ]:
        yield f"calls {module}.{name}", call(module, name, argument)
    yield "a class that reduces to mkdir", pickle.dumps(_Reduces(str(mark)))
    yield "protocol 0 of the same", pickle.dumps(_Reduces(str(mark)), 0)
    yield "protocol 1 of the same", pickle.dumps(_Reduces(str(mark)), 1)
    yield "a name of escapes", call("os\x1b]0;pwn\x07", "a\nb", where)
    yield "a name of a megabyte", call("os" * (1 << 19), "mkdir", where)
    yield "GLOBAL", P2 + b"cos\nmkdir\n" + t(where) + b"R."
    yield "INST", b"(" + where + b"iposix\nmkdir\n."
    yield "OBJ", P4 + b"(" + g("posix", "mkdir") + where + b"o."
    yield "NEWOBJ_EX", P4 + g(METADATA, "Metadata") + b")}\x92."
    yield "NEWOBJ with arguments", P4 + g(METADATA, "Metadata") + t(where) + b"\x81."
    for number, name in enumerate((b"\x82", b"\x83\0", b"\x84\0\0\0")):
        yield f"an extension of {1 << number} bytes", P4 + name + b"\1."
    yield "a persistent id", P4 + where + b"Q."
    yield "a persistent id in a line", b"Pos.mkdir\n."
    yield "a layout that is none", call("torch.serialization", "_get_layout", s("os"))


class _Reduces:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def changes() -> Iterator[tuple[str, bytes]]:
    """Pickles that change what they name: classes, functions, and attributes that objects live by."""
    slots = t(b"N", d((s("__init__"), g(FILES, "_StorageInfo"))))
    for module, name in [
        (METADATA, "Metadata"),
        (METADATA, "MetadataIndex"),
        (METADATA, "TensorProperties"),
        (METADATA, "_MEM_FORMAT_ENCODING"),
        (FILES, "_StorageInfo"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("torch.serialization", "_get_layout"),
    ]:
        yield f"slots of {name}", P4 + g(module, name) + slots + b"b."
        yield f"state of {name}", P4 + g(module, name) + d((s("cache"), b"}"), (s("__defaults__"), b")")) + b"b."
        yield f"items of {name}", P4 + g(module, name) + s("__init__") + b"Ns."
        yield f"appended to {name}", P4 + g(module, name) + b"Na."
    made = g(METADATA, "Metadata") + b")\x81"
    yield "slots of an object", P4 + made + slots + b"b."
    for name in ("__class__", "__dict__", "__setstate__", "__reduce__", "__eq__", "__hash__", "__getattr__"):
        yield f"{name} of an object", P4 + made + d((s(name), g(FILES, "_StorageInfo"))) + b"b."
    yield "two states", P4 + made + b"}b}b."
    yield "a state of a dict", P4 + b"}}b."
    yield "a state that is a text", P4 + made + s("state") + b"b."
    yield "a state with keys that are no text", P4 + made + d((b"]", b"N")) + b"b."
    yield "an enum's member", call(METADATA, "_MEM_FORMAT_ENCODING", i(0))


def large() -> Iterator[tuple[str, bytes]]:
    """Pickles of few bytes that ask for much memory or time, and some of many."""
    yield "nine bytes that ask for 4 GB", bytes.fromhex("80045d72000000102e")
    yield "nine bytes that ask for 34 GB", P4 + b"]r\xff\xff\xff\x7f."
    yield "PUT in a line", b"\x80\x02]p2147483647\n."
    yield "a gap in what is remembered", P4 + b"]q\xff."
    for name, opcode, count in [
        ("BINBYTES8", b"\x8e", 1 << 40),
        ("BINUNICODE8", b"\x8d", 1 << 40),
        ("BINUNICODE8 of 2**63", b"\x8d", 1 << 63),
        ("BYTEARRAY8", b"\x96", 1 << 34),
        ("FRAME", b"\x95", 1 << 40),
        ("FRAME of 2**64 - 1", b"\x95", (1 << 64) - 1),
    ]:
        yield f"{name} that is not there", P4 + opcode + struct.pack("<Q", count) + b"."
    for name, opcode in (("BINBYTES", b"B"), ("BINUNICODE", b"X"), ("LONG4", b"\x8b"), ("BINSTRING", b"T")):
        yield f"{name} that is not there", P4 + opcode + struct.pack("<I", (1 << 31) - 1) + b"."
    yield "a number of 8 MB", P4 + b"\x8b" + struct.pack("<I", 8 << 20) + b"\x7f" * (8 << 20) + b"."
    yield "a number of 100,000 digits in a line", b"L" + b"9" * 100_000 + b"L\n."
    yield "an I of 100,000 digits", b"I" + b"9" * 100_000 + b"\n."
    laughs = b"".join(b"]" + b"q" + bytes([n]) + b"(" + (b"h" + bytes([n - 1])) * 10 + b"e" for n in range(1, 200))
    yield "lists of lists of lists", P4 + b"]q\0" + laughs + b"\x85" * 0 + b"0" * 0 + b"."
    yield "a list of itself tenfold, forty times", P4 + b"]\x94" + b"".join(_ten_of(n) for n in range(40)) + b"."
    yield "tuples of tuples twice", P4 + b")\x94" + b"".join(b"h" + bytes([n]) + b"\x86\x94" for n in range(200)) + b"."
    for name, opcode in (("lists", b"]"), ("dicts", b"}"), ("marks", b"("), ("tuples", b"\x85"), ("sets", b"\x8f")):
        yield f"8 MB of {name}", P4 + b"N" + opcode * (8 << 20) + b"."
    yield "8 MB of what is remembered", P4 + b"]" + b"\x94" * (8 << 20) + b"."
    yield "8 MB of None", P4 + b"N" * (8 << 20) + b"."
    yield "8 MB of the same twice", P4 + b"N" + b"2" * (8 << 20) + b"."
    yield "8 MB of nothing", P4 + b"00" * (4 << 20) + b"."
    yield "8 MB of empty lists in a list", P4 + b"](" + b"]\x94" * (4 << 20) + b"e."
    yield "2 million new objects", P4 + g(METADATA, "Metadata") + b"\x94" + b"h\0)\x81" * (2 << 20) + b"."
    yield "a tuple 2 million deep as a key", P4 + b"}" + b")" + b"\x85" * 10_000 + b"Ns."
    yield "a dict in itself", P4 + b"}\x94" + s("a") + b"h\0s."
    yield "a list in itself", P4 + b"]\x94h\0a."
    numbers = b"".join(i(n * (2**61 - 1)) + b"N" for n in range(100_000))
    yield "keys that all meet", P4 + b"}(" + numbers + b"u."
    yield "a frame in a frame", P4 + (b"\x95" + struct.pack("<Q", 0)) * 100_000 + b"N."
    yield "100,000 protocols", P4 * 100_000 + b"N."


def _ten_of(number: int) -> bytes:
    return b"](" + (b"h" + bytes([number])) * 10 + b"e\x94"


def broken() -> Iterator[tuple[str, bytes]]:
    """Bytes that are no pickle, or one of something else."""
    yield "nothing", b""
    yield "a stop alone", b"."
    yield "no stop", P4 + b"N"
    yield "two pickles", P4 + b"N." + P4 + b"N."
    yield "something behind it", one() + b"\n"
    yield "two values", P4 + b"NN."
    yield "a mark that is left", P4 + b"(N."
    yield "a value that is not there", P4 + b"a."
    yield "one that was never remembered", P4 + b"h\x07."
    yield "a line without an end", P4 + b"c" + b"a" * 5000
    yield "text that is none", P4 + b"\x8c\x01\xff."
    yield "a set", P4 + b"\x8f(K\1\x90."
    yield "a frozenset", P4 + b"(K\1\x91."
    yield "a buffer", P4 + b"\x97."
    yield "a bytearray", P4 + b"\x96" + struct.pack("<Q", 1) + b"a."
    yield "protocol 6", b"\x80\x06N."
    yield "protocol 255", b"\x80\xffN."
    for name, value in {"None": None, "a number": 3, "a text": "a", "a dict": {"a": 1}, "nan": float("nan")}.items():
        yield f"a pickle of {name}", pickle.dumps(value)
    yield "JSON", b'{"state_dict_metadata": {}}'
    yield "zeros", bytes(1000)
    yield "all bytes", bytes(range(256)) * 20


def numbers() -> Iterator[tuple[str, bytes]]:
    """Indices of the right shape, with something in them that cannot be."""
    yield "negative offset", one(offset=i(-1))
    yield "beyond the end", one(length=i(10**9))
    yield "offset of 2**70", one(offset=i(2**70))
    yield "offset of 2**2000", one(offset=i(2**2000))
    yield "offset that is true", one(offset=b"\x88")
    yield "offset that is a text", one(offset=s("0"))
    yield "offset that is a float", one(offset=b"G" + struct.pack(">d", float("nan")))
    for path in (
        "../step-00000001/__0_0.distcp",
        "/etc/passwd",
        "..",
        "",
        "__0_0.distcp\0",
        "a" * 5000,
        "\x1b]0;pwn\x07",
    ):
        yield f"place in {path[:30]!r}", one(path=s(path))
    yield "place in a number", one(path=b"K\1")
    yield "place in a list", one(path=b"]")
    laughs = {"dicts": _doubled(b"}", b"}(", b"u"), "tuples": _doubled(b")", b"", b"\x86")}
    laughs["calls"] = _doubled(size(), g("torch", "Size"), b"\x86R")
    for kind, laugh in laughs.items():
        yield f"a place in {kind} of {kind}", one(path=laugh)
        yield f"a place at {kind} of {kind}", one(offset=laugh)
        yield f"a size of {kind} of {kind}", one(whole=size(laugh))
        yield f"a size that is {kind} of {kind}", one(whole=laugh)
        yield f"a path of {kind} of {kind}", one(names=t(laugh))
        yield f"a key of {kind} of {kind}", one(name=laugh)
        yield f"a part with the number {kind} of {kind}", _numbered(laugh)
    long = b"\x8b" + struct.pack("<I", 4000) + b"\x7f" * 4000
    yield "offset of 9,633 digits", one(offset=long)
    yield "place in 9,633 digits", one(path=long)
    yield "a size of 9,633 digits", one(whole=size(long))
    yield "a path of 9,633 digits", one(names=t(long, b"]"))
    yield "a transformation", one(more=((s("transform_descriptors"), b"](" + s("zstd") + b"e"),))
    yield "a size of 2**63", one(whole=size(i(2**63)))
    yield "sizes whose product is 2**80", one(whole=size(i(2**40), i(2**40)))
    yield "a negative size", one(whole=size(i(-2)))
    yield "a size that is true", one(whole=size(b"\x88"))
    yield "a size of texts", one(whole=size(s("2")))
    yield "a size of a million dimensions", one(whole=size(*[b"K\1"] * 1_000_000))
    yield "a size that is a tuple", one(whole=t(i(2)))
    yield "a size of nothing", one(whole=g("torch", "Size") + b")R")
    yield "a size of two arguments", one(whole=g("torch", "Size") + t(t(i(2)), t(i(2))) + b"R")
    yield "an offset of other dimensions", one(at=size(i(0), i(0)))
    yield "an offset beyond the size", one(at=size(i(1)))
    yield "a dtype that is a text", one(dtype=s("float32"))
    yield "a dtype that is a class", one(dtype=g("torch", "Size"))
    yield "a layout that is sparse", one(layout=s("torch.sparse_coo"))
    yield "a layout that is none", one(layout=s("a"))
    yield "a key that is a number", one(name=b"K\1")
    yield "a key that is a tuple", one(name=t(s("a")))
    yield "a key of escapes", one(name=s("\x1b]0;pwn\x07"), path=s("b"))
    yield "a key of 5 MB", one(name=s("a" * (5 << 20)), path=s("b"))
    yield "a key of half letters", one(name=s(b"\xed\xa0\x80"), path=s("b"))
    yield "no path", one(names=b")")
    yield "a path of a million names", one(names=t(*[s("a")] * 500_000))
    yield "a path of floats", one(names=t(b"G" + struct.pack(">d", 1.0)))
    yield "a path that is a list", one(names=b"](" + s("a") + b"e")
    nothing = d()
    yield "an empty index", metadata(nothing, nothing, nothing)
    yield "no places", metadata(d((s("a"), tensor(size(i(2)), b"]"))), d((s("a"), t(s("a")))), nothing)
    yield "5,000 parts that overlap", _tangled()
    yield "parts that are missing", P4 + new("Metadata") + b"."
    yield "lists for dicts", metadata(b"]", b"]", b"]")
    yield "one tensor 100,000 times", _shared_tensor()
    yield "one chunk 100,000 times", _shared_chunk()
    yield "fields without end", _many_fields()


def _tangled() -> bytes:
    """Each lies across the one before."""
    numbers = range(5_000)
    whole, name, sizes = size(i(10_000)), s("a"), size(i(2))
    chunks = b"](" + b"".join(chunk(size(i(n)), sizes) for n in numbers) + b"e"
    places = [(key(name, size(i(n))), place(DATA, i(0), i(1))) for n in numbers]
    return metadata(d((name, tensor(whole, chunks))), d((name, t(name))), d(*places))


def _numbered(hint: bytes) -> bytes:
    whole, at, name = size(i(2)), size(i(0)), s("a")
    described, where = tensor(whole, b"](" + chunk(at, whole) + b"e"), place(DATA, i(0), i(1))
    return metadata(d((name, described)), d((name, t(name))), d((key(name, at, hint), where)))


def _doubled(first: bytes, before: bytes, behind: bytes) -> bytes:
    """Each holds the one before twice: written out, the last holds 2**200 of them."""
    made = first + b"q\0"
    for n in range(200):
        made = before + made + b"h" + bytes([n]) + behind + b"q" + bytes([n + 1])
    return made


def _shared_tensor() -> bytes:
    """Many keys whose tensor is the same one, of many parts: to look at each part of each takes ten billion looks."""
    whole = size(i(100_000))
    chunks = b"](" + b"".join(chunk(size(i(n)), size(i(1))) for n in range(500)) + b"e"
    keys = b"".join(s(f"k{n}") + b"h\0" for n in range(100_000))
    described = tensor(whole, chunks) + b"\x94" + b"0" * 0
    return metadata(b"}(" + s("first") + described + keys + b"u", d(), d())


def _shared_chunk() -> bytes:
    one_chunk = chunk(size(i(0)), size(i(1))) + b"\x94" + b"h\0" * 100_000
    return metadata(d((s("a"), tensor(size(i(100_000)), b"](" + one_chunk + b"e"))), d((s("a"), t(s("a")))), d())


def _many_fields() -> bytes:
    fields = b"}(" + b"".join(s(f"f{n}") + b"N" for n in range(50_000)) + b"u"
    kept = g(METADATA, "TensorStorageMetadata") + b")\x81" + fields + b"b\x94"
    return metadata(b"}(" + s("k") + kept + b"".join(s(f"k{n}") + b"h\0" for n in range(50_000)) + b"u", d(), d())


# ----------------------------------------------------------------------------------------------- forged archives

REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
HOOKS = b"ccollections\nOrderedDict\n)R"


def view(
    kind: bytes = b"ctorch\nFloatStorage\n",
    count: bytes = b"K\x23",
    first: bytes = b"K\0",
    sizes: bytes = b"K\7K\5\x86",
    strides: bytes = b"K\5K\1\x86",
    function: bytes = REBUILD,
    label: bytes = s("0"),
    more: bytes = b"",
) -> bytes:
    """The pickle of the tensor of 7 times 5 numbers that is there, but for what is said otherwise."""
    storage = b"((" + s("storage") + kind + label + s("cpu") + count + b"tQ"
    return P2 + function + storage + first + sizes + strides + b"\x89" + HOOKS + more + b"tR."


def archive(pickled: bytes, *more: tuple[str, bytes], packed: bool = False, order: bytes = b"little") -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archived:
        for name, content in (("data.pkl", pickled), ("byteorder", order), ("version", b"3\n"), *more):
            archived.writestr(f"archive/{name}", content)
    return whole.getvalue()


NUMBERS = ("data/0", bytes(140))


def tensors(mark: Path) -> Iterator[tuple[str, bytes]]:
    """In the place of the tensor of 7 times 5 numbers."""
    where = s(str(mark))
    yield "code", archive(P2 + b"cposix\nmkdir\n" + t(where) + b"R.", NUMBERS)
    yield "a bytearray of 2 GB", archive(P2 + b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.", NUMBERS)
    yield "an archive of 1 MB that is 1 GB", archive(view(), ("data/0", bytes(1 << 27)), packed=True)
    yield "a pickle that is packed", archive(view(), NUMBERS, packed=True)
    yield "numbers that are not there", archive(view())
    yield "fewer numbers than it says", archive(view(), ("data/0", bytes(139)))
    yield "more numbers than there are", archive(view(count=i(10**6)), NUMBERS)
    yield "2**62 numbers", archive(view(count=i(2**62)), NUMBERS)
    yield "fewer than none", archive(view(count=i(-1)), NUMBERS)
    yield "from the 30th on", archive(view(first=b"K\x1e"), NUMBERS)
    yield "from before the first on", archive(view(first=i(-1)), NUMBERS)
    yield "strides beyond the end", archive(view(strides=b"K\6K\1\x86"), NUMBERS)
    yield "strides of 2**60", archive(view(strides=i(2**60) + b"K\1\x86"), NUMBERS)
    yield "negative strides", archive(view(strides=i(-5) + b"K\1\x86"), NUMBERS)
    yield (
        "a size of 2**50 by strides of none",
        archive(view(sizes=i(2**50) + b"K\5\x86", strides=b"K\0K\0\x86"), NUMBERS),
    )
    yield "another size", archive(view(sizes=b"K\5K\7\x86", strides=b"K\7K\1\x86"), NUMBERS)
    yield "other dimensions", archive(view(sizes=b"K\x23\x85", strides=b"K\1\x85"), NUMBERS)
    yield "a size that is a list", archive(view(sizes=b"]"), NUMBERS)
    yield "another dtype", archive(view(kind=b"ctorch\nIntStorage\n"), NUMBERS)
    yield "a storage that is a text", archive(view(kind=s("FloatStorage")), NUMBERS)
    yield "a storage without a name", archive(view(label=b"N"), NUMBERS)
    yield "a storage that is elsewhere", archive(view(label=s("../../data/0")), NUMBERS)
    yield "numbers without a type", archive(view(kind=b"ctorch.storage\nUntypedStorage\n"), NUMBERS)
    for name in ("_rebuild_parameter", "_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_meta_tensor_no_storage"):
        yield name, archive(view(function=f"ctorch._utils\n{name}\n".encode()), NUMBERS)
    yield "_rebuild_from_type_v2", archive(view(function=b"ctorch._tensor\n_rebuild_from_type_v2\n"), NUMBERS)
    yield "attributes", archive(view()[:-1] + b"}" + s("grad") + b"Nsb.", NUMBERS)
    yield "metadata that is code", archive(view(more=b"}" + s("a") + b"cos\nsystem\ns"), NUMBERS)
    yield "metadata that is a million", archive(view(more=b"}(" + (s("conj") + b"\x88") * 100_000 + b"u"), NUMBERS)
    yield "bytes in another order", archive(view(), NUMBERS, order=b"big")
    yield "two records of one name", archive(view(), NUMBERS, ("data/1", b"")).replace(b"data/1", b"data/0")
    yield "100,000 records", archive(view(), NUMBERS, *((f"r{n}", b"") for n in range(10_000)))
    yield "a plain value", archive(P2 + b"K\1.")
    yield "no pickle", archive(view(), NUMBERS).replace(b"data.pkl", b"data.pkI")
    whole = archive(view(), NUMBERS)
    yield "an archive cut short", whole[:-30]
    yield "a header that lies elsewhere", whole.replace(b"PK\1\2", b"PK\1\3")
    yield "a record that begins nowhere", whole.replace(b"PK\3\4", b"PK\3\5")
    flagged = bytearray(whole)
    flagged[whole.index(b"PK\1\2") + 8] |= 1
    yield "a record with a password", bytes(flagged)
    for name, at, what in (("sizes", 20, b"\xff" * 8), ("an offset", 42, b"\xff\xff\xff\x7f")):
        lied = bytearray(whole)
        lied[whole.index(b"PK\1\2") + at :][: len(what)] = what
        start = whole.index(b"PK\1\2") + at
        lied[start : start + len(what)] = what
        yield f"{name} that are not there", bytes(lied)
    old = io.BytesIO()
    torch.save(torch.zeros(7, 5), old, _use_new_zipfile_serialization=False)
    yield "torch's format of old", old.getvalue()
    claims = old.getvalue().replace(b"K\x23", b"J\xff\xff\xff\x7f"[:5], 1)
    yield "torch's format of old, of 8 GB", claims
    yield "zeros", bytes(1000)
    yield "nothing but the end of a zip", b"PK\5\6" + bytes(18)


def values(mark: Path) -> Iterator[tuple[str, bytes]]:
    """In the place of a number."""
    where = s(str(mark))
    yield "code", archive(P2 + b"cposix\nmkdir\n" + t(where) + b"R.")
    yield "eval", archive(P2 + b"cbuiltins\neval\n" + t(s(f"open({str(mark)!r}, 'w')")) + b"R.")
    yield "a bytearray of 2 GB", archive(P2 + b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.")
    yield "bytes of 2 GB", archive(P2 + b"c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R.")
    yield "a set", archive(P2 + b"c__builtin__\nset\n](K\1e\x85R.")
    yield "an OrderedDict", archive(P2 + b"ccollections\nOrderedDict\n)R.")
    yield "another encoding", archive(P2 + b"c_codecs\nencode\n" + s("a") + s("zip") + b"\x86R.")
    yield "bytes that are none", archive(P2 + b"c_codecs\nencode\n" + s("\u1234") + s("latin1") + b"\x86R.")
    yield "bytes of bytes", archive(P2 + b"c_codecs\nencode\n" + b"]" + s("latin1") + b"\x86R.")
    yield "a state for bytes", archive(P2 + b"c__builtin__\nbytes\n)R}b}b.")
    yield "a list 100,000 deep", archive(P2 + b"]" * 100_000 + b"a" * 99_999 + b".")
    yield "a list 200 deep", archive(P2 + b"]" * 200 + b"a" * 199 + b".")
    yield "a list in itself", archive(P2 + b"]q\0h\0a.")
    laughs = b"".join(b"](" + (b"h" + bytes([n])) * 10 + b"eq" + bytes([n + 1]) for n in range(30))
    yield "ten lists of ten lists of ten", archive(P2 + b"]q\0" + laughs + b"\x85" * 0 + b".")
    tenfold = (
        P2 + b"]q\0" + b"".join(b"0](" + (b"h" + bytes([n])) * 10 + b"eq" + bytes([n + 1]) for n in range(30)) + b"."
    )
    yield "the same, with what is not known", archive(tenfold)
    nested = P2 + b")q\0" + b"".join(b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(60)) + b"."
    yield "pairs of pairs, sixty times", archive(nested)
    yield "keys that all meet", archive(P2 + b"}(" + b"".join(i(n * (2**61 - 1)) + b"N" for n in range(50_000)) + b"u.")
    meeting = P2 + b"]" + b"".join(b"}(" + b"".join(_meeting(n) for n in range(10_000)) + b"ua" for _ in range(45))
    yield "45 dicts of keys that all meet", archive(meeting + b".")
    yield "keys that are lists", archive(P2 + b"}]Ns.")
    yield "a tensor", archive(view(), NUMBERS)
    yield "a dtype", archive(P2 + b"ctorch\nfloat32\n.")
    yield "nothing", b""
    yield "a pickle alone", P2 + b"K\1."
    yield "packed", archive(P2 + b"K\1.", ("more", bytes(1 << 20)), packed=True)


def _meeting(number: int) -> bytes:
    return i(number * (2**61 - 1)) + b"N"


# --------------------------------------------------------------------------------------------------- manifests


def manifests() -> Iterator[tuple[str, Callable[[dict[str, Any]], Any]]]:
    """Changes of the manifest's JSON, or a text in its place."""
    for name, value in {
        "Infinity": float("inf"),
        "-Infinity": float("-inf"),
        "NaN": float("nan"),
        "1e400": 10**400,
        "4.7": 4.7,
        "2.0": 2.0,
        "text": "2",
        "true": True,
        "null": None,
        "a list": [2],
        "-1": -1,
        "2**63": 2**63,
        "2**70": 2**70,
    }.items():
        for field in ("step", "ranks"):
            yield f"{field} is {name}", lambda told, field=field, value=value: told | {field: value}
        yield f"bytes is {name}", lambda told, value=value: _facts(told, bytes=value)
    yield "10**18 ranks", lambda told: told | {"ranks": 10**18}
    yield "a million and one ranks", lambda told: told | {"ranks": 1_000_001}
    for value in (True, 1.0, "1", None, [], 2, 10**30, [[[]]]):
        yield f"format is {value!r}", lambda told, value=value: told | {"format": value}
    for value in (None, [], "a", 3):
        yield f"about is {value!r}", lambda told, value=value: told | {"about": value}
        yield f"files is {value!r}", lambda told, value=value: told | {"files": value}
        yield f"sha256 is {value!r}", lambda told, value=value: _facts(told, sha256=value)
    yield "a file is null", lambda told: told | {"files": told["files"] | {"a": None}}
    for path in ("../x", "/etc/passwd", "..", ".", "", "a/b", "a\nb", "a\0b", "a" * 5000, "\x1b]0;a\x07", "a\\b"):
        facts = {"bytes": 1, "sha256": "0" * 64}
        yield (
            f"a file {path[:20]!r}",
            lambda told, path=path, facts=facts: told | {"files": told["files"] | {path: facts}},
        )
    for depth in (60, 400, 900, 5_000):
        yield f"about is {depth} deep", lambda told, depth=depth: _deep(told, depth)
    for missing in ("format", "step", "ranks", "files", "about"):
        yield f"no {missing}", lambda told, missing=missing: {k: v for k, v in told.items() if k != missing}
    for name, text in {
        "is nothing": b"",
        "is a list": b"[]",
        "is a number": b"3",
        "is text": b'"manifest"',
        "is 100,000 lists deep": b"[" * 100_000,
        "is 100,000 dicts deep": b'{"a":' * 100_000,
        "has 5,000 digits": b'{"format": 1, "step": ' + b"9" * 5000 + b"}",
        "has 1e400": b'{"format": 1e400}',
        "is UTF-16": '{"format": 1}'.encode("utf-16"),
        "has half a letter": b'{"format": 1, "step": "\xed\xa0\x80"}',
        "is binary": bytes(range(256)),
        "is 20 MB": b"[" + b"1," * (10 << 20) + b"1]",
        "says NaN": b'{"format": NaN}',
    }.items():
        yield name, lambda told, text=text: text


def _facts(told: dict[str, Any], **changes: Any) -> dict[str, Any]:
    name = "__0_0.distcp"
    return told | {"files": told["files"] | {name: told["files"][name] | changes}}


def _deep(told: dict[str, Any], depth: int) -> bytes:
    text = json.dumps(told | {"about": {"a": "HERE"}})
    return text.replace('"HERE"', "[" * depth + "]" * depth).encode()


# ------------------------------------------------------------------------------------------------- what is done


def index_is(content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / ".metadata").write_bytes(content)
        if len(content) > 1 << 20:  # no index is larger than half of the files that it is of
            (folder / "more.distcp").write_bytes(bytes(2 * len(content)))
        consistent(folder)

    return change


def entry_is(name: str, content: bytes) -> Callable[[Path], None]:
    """In the place of one tensor or value, at the end of its file."""

    def change(folder: Path) -> None:
        known = pickle.loads((folder / ".metadata").read_bytes())
        where = next(info for index, info in known.storage_data.items() if index.fqn == name)
        path = folder / where.relative_path
        where.offset, where.length = path.stat().st_size, len(content)
        path.write_bytes(path.read_bytes() + content)
        (folder / ".metadata").write_bytes(pickle.dumps(known))
        consistent(folder)

    return change


def parts_are(*parts: tuple[tuple[int, int], tuple[int, int]]) -> Callable[[Path], None]:
    """The tensor of 7 times 5 numbers in parts, each with its numbers."""

    def change(folder: Path) -> None:
        known = pickle.loads((folder / ".metadata").read_bytes())
        at, where = next((at, info) for at, info in known.storage_data.items() if at.fqn == "tensors.dealt")
        del known.storage_data[at]
        chunks = known.state_dict_metadata[at.fqn].chunks
        path = folder / where.relative_path
        chunks[:] = [type(chunks[0])(torch.Size(start), torch.Size(long)) for start, long in parts]
        for number, part in enumerate(chunks):
            content = io.BytesIO()
            torch.save(torch.zeros(part.sizes, dtype=torch.float32), content)
            place = type(where)(where.relative_path, path.stat().st_size, len(content.getvalue()))
            known.storage_data[type(at)(at.fqn, part.offsets, number)] = place
            path.write_bytes(path.read_bytes() + content.getvalue())
        (folder / ".metadata").write_bytes(pickle.dumps(known))
        consistent(folder)

    return change


PARTS = {
    "rows that overlap": [((0, 0), (4, 5)), ((2, 0), (3, 5))],
    "columns that overlap": [((0, 0), (7, 3)), ((0, 1), (7, 2))],
    "parts that overlap in a corner": [((0, 0), (5, 4)), ((4, 3), (3, 2)), ((5, 0), (2, 3)), ((0, 4), (3, 1))],
    "parts within parts": [((0, 0), (6, 5)), ((1, 1), (1, 5))],
}


def manifest_is(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        told = change(json.loads((folder / "manifest.json").read_bytes()))
        text = told if isinstance(told, bytes) else json.dumps(told).encode()
        text = text.replace(str(10**400).encode(), b"1e400")
        sealed(folder, text)

    return changed


def consistent(folder: Path) -> None:
    """Give the files as they are now a manifest that fits."""
    told = json.loads((folder / "manifest.json").read_bytes())
    for name in {*told["files"], *(path.name for path in folder.glob("*.distcp"))}:
        data = (folder / name).read_bytes()
        told["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    sealed(folder, json.dumps(told).encode())


def sealed(folder: Path, text: bytes) -> None:
    (folder / "manifest.json").write_bytes(text)
    (folder / "manifest.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")


def tampered() -> Iterator[tuple[str, Callable[[Path], Any]]]:
    """Changes that leave the checksums as they were."""
    for name in ("__0_0.distcp", ".metadata", "manifest.json", "manifest.sha256"):
        yield f"{name} is gone", lambda folder, name=name: (folder / name).unlink()
        yield f"{name} is empty", lambda folder, name=name: (folder / name).write_bytes(b"")
        yield f"{name} is half", lambda folder, name=name: _rewrite(folder / name, lambda old: old[: len(old) // 2])
        yield f"{name} has a byte more", lambda folder, name=name: _rewrite(folder / name, lambda old: old + b"\0")
        yield f"{name} turned round", lambda folder, name=name: _rewrite(folder / name, lambda old: old[::-1])
        yield (
            f"{name} has a bit turned",
            lambda folder, name=name: _rewrite(folder / name, lambda old: old[:-1] + bytes([old[-1] ^ 1])),
        )
        yield f"{name} is a folder", lambda folder, name=name: ((folder / name).unlink(), (folder / name).mkdir())
        yield f"{name} is a link", lambda folder, name=name: _elsewhere(folder / name)
        yield f"{name} is a pipe", lambda folder, name=name: ((folder / name).unlink(), os.mkfifo(folder / name))
        yield (
            f"{name} is /dev/zero",
            lambda folder, name=name: (
                (folder / name).unlink(),
                (folder / name).symlink_to("/dev/zero"),
            ),
        )
        yield f"{name} has 2**40 bytes", lambda folder, name=name: os.truncate(folder / name, 1 << 40)
    yield "the folder was renamed", lambda folder: folder.rename(folder.with_name("step-00000009"))


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def _elsewhere(path: Path) -> None:
    other = path.rename(path.parent.parent / f"{path.name}-elsewhere")
    path.symlink_to(other)


def at_random(count: int, seed: int, good: bytes) -> Iterator[Attack]:
    """Bytes of an index changed here and there, words of pickles in any order, and bits of files that have turned."""
    chance = random.Random(seed)
    words = [
        P4,
        s("a"),
        i(3),
        b"]",
        b"}",
        b"(",
        b")",
        b"t",
        b"e",
        b"u",
        b"s",
        b"a",
        b"b",
        b"R",
        b"\x81",
        b"\x94",
        b"h\0",
    ]
    words += [g(METADATA, "Metadata"), g("torch", "Size"), g("posix", "mkdir"), g(FILES, "_StorageInfo"), b"N", b"\x85"]
    files = ["__0_0.distcp", ".metadata", "manifest.json", "manifest.sha256"]
    for number in range(count):
        if number % 3 == 0:
            changed = bytearray(good)
            for _ in range(chance.randint(1, 4)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            yield Attack(f"random: bytes of an index, {number}", index_is(bytes(changed)), ANY)
        elif number % 3 == 1:
            mixed = P4 + b"".join(chance.choices(words, k=chance.randint(1, 60))) + b"."
            yield Attack(f"random: words of a pickle, {number}", index_is(mixed))
        else:
            yield Attack(f"random: tampered, {number}", _random_damage(chance.choice(files), chance.random(), chance))


def _random_damage(name: str, where: float, chance: random.Random) -> Callable[[Path], None]:
    how, bit = chance.choice(["flip", "cut", "swap"]), 1 << chance.randrange(8)

    def change(folder: Path) -> None:
        old = (folder / name).read_bytes()
        at = int(where * len(old))
        flipped = old[:at] + bytes([old[at] ^ bit]) + old[at + 1 :]
        swapped = old[at:] + old[:at] if 0 < at < len(old) and old[at:] + old[:at] != old else flipped
        (folder / name).write_bytes({"flip": flipped, "cut": old[:at], "swap": swapped}[how])

    return change


def attacks(mark: Path) -> list[Attack]:
    """All that have a name."""
    found = [
        Attack(f"{kind}: {name}", index_is(content))
        for kind, made in (("code", code(mark)), ("changes", changes()), ("large", large()), ("broken", broken()))
        for name, content in made
    ]
    found += [Attack(f"index: {name}", index_is(content)) for name, content in numbers()]
    found += [Attack(f"index: {name}", parts_are(*parts)) for name, parts in PARTS.items()]
    whole = parts_are(((0, 0), (1, 2)), ((0, 2), (2, 3)), ((2, 1), (5, 4)), ((1, 0), (6, 1)), ((1, 1), (1, 1)))
    found.append(Attack("index: parts that go round each other", whole, LOADED))
    found += [Attack(f"tensor: {name}", entry_is("tensors.dealt", content)) for name, content in tensors(mark)]
    found += [Attack(f"value: {name}", entry_is("step", content)) for name, content in values(mark)]
    found += [Attack(f"manifest: {name}", manifest_is(change)) for name, change in manifests()]
    found += [Attack(f"tampered: {name}", change) for name, change in tampered()]
    assert len({attack.name for attack in found}) == len(found)
    return found


# ------------------------------------------------------------------------------------------------- what came of it


def reachable() -> dict[str, Any]:
    """Classes and functions that a checkpoint names or that reading one runs through."""
    import collections

    from torch.distributed.checkpoint import default_planner, filesystem, metadata, planner

    modules = (metadata, filesystem, planner, default_planner, torch.serialization, torch._utils, pickle, zipfile, json)
    found = {
        f"{module.__name__}.{name}": value
        for module in (*modules, *(module for name, module in sys.modules.items() if name.startswith("longring.train")))
        for name, value in vars(module).items()
        if isinstance(value, type) or callable(getattr(value, "__code__", None)) or hasattr(value, "__code__")
    }
    return found | {"Size": torch.Size, "Tensor": torch.Tensor, "OrderedDict": collections.OrderedDict}


def attributes(things: dict[str, Any]) -> dict[str, Any]:
    """What their attributes are, one by one, and of dicts among them what is in them; the objects, so that none is
    gone when it is compared."""
    found: dict[str, Any] = {}
    for name, thing in things.items():
        for key, value in vars(thing).items():
            found[f"{name}.{key}"] = value
            if isinstance(value, dict):
                found.update((f"{name}.{key}[{inner!r}]", kept) for inner, kept in value.items())
        for key in ("__defaults__", "__kwdefaults__", "__code__", "__bases__", "__name__", "__module__"):
            found[f"{name}:{key}"] = getattr(thing, key, None)
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before.keys() | after.keys() if not _is_same(before.get(name), after.get(name))]


def _is_same(was: Any, now: Any) -> bool:
    return was is now or (type(was) is type(now) is str and was == now)  # the names of types of C are made when asked


class Outcome(NamedTuple):
    name: str
    wrong: str  # empty: as it must be
    said: str
    seconds: float
    memory: int


def tried(attack: Attack, folder: Path, mark: Path, before: dict[str, Any], things: dict[str, Any]) -> Outcome:
    """Find and load, as everything that reads a checkpoint does."""
    attack.change(folder / NEWER)
    _forget_peak()
    at, began = _status("VmRSS"), time.process_time()
    said = _read(folder)
    seconds, memory = time.process_time() - began, max(0, _status("VmHWM") - at)
    other = changed(before, attributes(things))
    wrong = [
        (mark.exists(), "it ran code"),
        (bool(other), f"it changed {other[:3]}"),
        (memory > MOST_MEMORY, f"it took {memory >> 20} MiB"),
        (seconds > MOST_SECONDS, f"it took {seconds:.0f} s"),
        (RAW.search(said) is not None, "a raw error of Python's"),
        (not said.isprintable() or len(said) > 2000, "a message that is not one line"),
        (attack.must == REFUSED and said == "loaded step 2", "it was loaded"),
        (attack.must == LOADED and said != "loaded step 2", "it was not loaded"),
    ]
    return Outcome(attack.name, "; ".join(why for holds, why in wrong if holds), said, seconds, memory)


def _read(folder: Path) -> str:
    try:
        found = checkpoints.find(folder)
        if found.step == 2:
            checkpoints.load(found, state_of(10**6))
            return "loaded step 2"
        assert loaded(folder) == 1, "the earlier one is whole"
        return f"went on to step 1: {found.skipped[0].why}"
    except lr.LongringError as refusal:
        return str(refusal)
    except BaseException as error:
        return f"raw {type(error).__name__}: {error}"


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def run(work: Path, chosen: list[Attack], mark: Path) -> list[Outcome]:
    """One after the other, in this process."""
    template, place = work / "template", work / "run"
    for step in (1, 2):
        saved(template, step)
    checkpoints.release(template)
    assert loaded(template) == 2
    pickle.loads((template / NEWER / ".metadata").read_bytes())  # which fills torch's own cache of layouts
    things = reachable()
    before = attributes(things)
    outcomes = []
    for attack in chosen:
        shutil.copytree(template, place)
        outcomes.append(tried(attack, place, mark, before, things))
        shutil.rmtree(place)
        shutil.rmtree(mark, ignore_errors=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="attacks whose name has this in it")
    parser.add_argument("--json", action="store_true", help="one JSON list of outcomes")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))  # so that what is missed does not end the machine
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        mark = work / MARK
        good = (saved(work / "good", 2) / ".metadata").read_bytes()
        chosen = [*attacks(mark), *at_random(asked.random, asked.seed, good)]
        outcomes = run(work, [attack for attack in chosen if asked.only in attack.name], mark)
    if asked.json:
        print(json.dumps([outcome._asdict() for outcome in outcomes]))  # noqa: T201
        return
    for outcome in outcomes:
        print(f"{outcome.wrong or 'ok'}: {outcome.name}: {outcome.said[:160]!r}")  # noqa: T201
    kinds: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        kinds.setdefault(outcome.name.partition(":")[0], []).append(outcome)
    for kind, some in kinds.items():
        wrong = sum(bool(outcome.wrong) for outcome in some)
        memory, seconds = max(outcome.memory for outcome in some), max(outcome.seconds for outcome in some)
        told = f"{kind}: {len(some)} attacks, {wrong} wrong, at most {memory >> 20} MiB and {seconds:.1f} s"
        print(told)  # noqa: T201
    sys.exit(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    main()
