"""A pickle read as data: it looks nothing up, calls nothing and sets no attribute, whatever the file asks for.

pickle.Unpickler imports what a file names, calls it, and sets attributes of the result, or of a class or a function.
Here a name of a short list becomes a `Name`, a call or a new object a `Call` with its arguments and its state, and a
dict a list of keys and values. Whoever asked for the file makes of them what it is sure of.

Known are the instructions that Python's own pickler writes for plain values and dataclasses, in protocols 2 to 5. What
a file makes takes some 25 bytes of memory for each byte of it, and time in proportion to its size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any


class Unreadable(Exception):
    """Not a pickle, or one with something in it that no checkpoint needs."""


class Stranger(Unreadable):
    """A name that has no place in the file."""


class Name:
    """What a pickle calls a class or a function by. Equal only to itself."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Call:
    """What a pickle would have called or made new, with which arguments, and the state to give to the result."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: Name, args: tuple[Any, ...]) -> None:
        self.name, self.args, self.state = name, args, None


class Pairs(list[Any]):
    """A dict as a key, its value, the next key, ...: keys may be anything, and are not hashed."""

    __slots__ = ()


class Reference:
    """A persistent id: what lies beside the pickle, such as the numbers of a tensor."""

    __slots__ = ("id",)

    def __init__(self, id_: Any) -> None:
        self.id = id_


def load(content: bytes, names: Iterable[Name], *, has_references: bool = False) -> Any:
    """The one value of a pickle: None, bool, int, float, str, bytes, lists and tuples of them, or a class of above."""
    try:
        return _Machine(content, names, has_references).run()
    except Unreadable:
        raise
    except (IndexError, struct.error):
        raise Unreadable("it ends too early, or takes what is not there") from None
    except (ValueError, OverflowError):
        raise Unreadable("it has a text or a number that is none") from None
    except MemoryError:
        raise Unreadable("it takes more memory than there is") from None


class _Machine:
    def __init__(self, content: bytes, names: Iterable[Name], has_references: bool) -> None:
        self.content, self.at = content, 0
        self.names = {(name.module, name.name): name for name in names}
        self.has_references = has_references
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []  # a pickler numbers what it remembers from 0 on: no gaps to make room for
        self.left = 1000 + len(content) // 4  # of what takes more memory than a reference to it

    def run(self) -> Any:
        content, known = self.content, _KNOWN
        while True:
            code = content[self.at]
            self.at += 1
            if code == _STOP:
                break
            do = known.get(code)
            if do is None:
                raise Unreadable(f"it has the instruction {bytes([code])!r}, which no checkpoint needs")
            do(self)
        if self.at != len(content) or len(self.stack) != 1 or self.marks:
            raise Unreadable("there is more in it than one value")
        return self.stack[0]

    # ------------------------------------------------------------------------------------------------ taking bytes

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.content):
            raise Unreadable(f"it ends before the {count} bytes that it announces")
        taken, self.at = self.content[self.at : end], end
        return taken

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def line(self) -> str:
        end = self.content.index(b"\n", self.at, self.at + 1000)
        taken, self.at = self.content[self.at : end], end + 1
        return taken.decode("utf-8")

    # ------------------------------------------------------------------------------------------------ the stack

    def made(self, value: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise Unreadable("it makes more than a file of its size needs")
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        at = self.marks.pop()
        if not 0 <= at <= len(self.stack):
            raise Unreadable("it takes what is not there")
        taken = self.stack[at:]
        del self.stack[at:]
        return taken

    def tuple_of(self, count: int) -> None:
        self.marks.append(len(self.stack) - count)
        self.made(tuple(self.since_mark()))

    def target(self, kind: type) -> Any:
        target = self.stack[-1]
        if type(target) is not kind:
            raise Unreadable(f"it changes {target if type(target) is Name else type(target).__name__}")
        return target

    # ------------------------------------------------------------------------------------------------ instructions

    def proto(self) -> None:
        if not 2 <= self.number(1) <= 5:
            raise Unreadable("it is of no protocol from 2 to 5")

    def frame(self) -> None:
        if self.number(8) > len(self.content) - self.at:
            raise Unreadable("it ends before its frame does")

    def mark(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Unreadable("it makes more than a file of its size needs")
        self.marks.append(len(self.stack))

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def get(self) -> None:  # this and `long_get` are a third of an index
        self.stack.append(self.memo[self.content[self.at]])
        self.at += 1

    def long_get(self) -> None:
        at = self.at
        self.at = at + 4
        self.stack.append(self.memo[_FOUR.unpack_from(self.content, at)[0]])

    def put(self, index: int) -> None:
        if index == len(self.memo):
            self.memo.append(self.stack[-1])
        elif index < len(self.memo):
            self.memo[index] = self.stack[-1]
        else:
            raise Unreadable(f"it remembers something as number {index}, after {len(self.memo)}")

    def byte(self) -> None:
        self.stack.append(self.content[self.at])
        self.at += 1

    def string(self, size: int) -> None:
        self.stack.append(self.take(size).decode("utf-8", "surrogatepass"))

    def float_(self) -> None:
        self.stack.append(struct.unpack(">d", self.take(8))[0])

    def named(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise Unreadable("it has a name that is no text")
        known = self.names.get((module, name))
        if known is None:
            text = f"{module[:100]}.{name[:100]}"
            raise Stranger(text if text.isprintable() else ascii(text))
        self.stack.append(known)

    def stack_global(self) -> None:
        name = self.stack.pop()
        self.named(self.stack.pop(), name)

    def global_(self) -> None:
        module = self.line()
        self.named(module, self.line())

    def call(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(args) is not tuple:
            raise Unreadable(f"it calls a {type(name).__name__}")
        self.made(Call(name, args))

    def build(self) -> None:
        state, target = self.stack.pop(), self.target(Call)
        if target.state is not None:
            raise Unreadable(f"it gives {target.name} two states")
        target.state = state

    def append(self) -> None:
        value = self.stack.pop()
        self.target(list).append(value)

    def appends(self) -> None:
        values = self.since_mark()
        self.target(list).extend(values)

    def setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.target(Pairs).extend((key, value))

    def setitems(self) -> None:
        values = self.since_mark()
        if len(values) % 2:
            raise Unreadable("it has a key without a value")
        self.target(Pairs).extend(values)

    def reference(self) -> None:
        if not self.has_references:
            raise Stranger("something outside the file")
        self.made(Reference(self.stack.pop()))


_STOP, _FOUR = ord("."), struct.Struct("<I")
_KNOWN: dict[int, Callable[[_Machine], None]] = {
    ord(code): do
    for code, do in {
        b"\x80": _Machine.proto,
        b"\x95": _Machine.frame,
        b"(": _Machine.mark,
        b"\x94": _Machine.memoize,
        b"q": lambda m: m.put(m.number(1)),
        b"r": lambda m: m.put(m.number(4)),
        b"h": _Machine.get,
        b"j": _Machine.long_get,
        b"N": lambda m: m.stack.append(None),
        b"\x88": lambda m: m.stack.append(True),
        b"\x89": lambda m: m.stack.append(False),
        b"K": _Machine.byte,
        b"M": lambda m: m.stack.append(m.number(2)),
        b"J": lambda m: m.stack.append(m.number(4, signed=True)),
        b"\x8a": lambda m: m.stack.append(m.number(m.number(1), signed=True)),
        b"\x8b": lambda m: m.stack.append(m.number(m.number(4), signed=True)),
        b"G": _Machine.float_,
        b"\x8c": lambda m: m.string(m.number(1)),
        b"X": lambda m: m.string(m.number(4)),
        b"\x8d": lambda m: m.string(m.number(8)),
        b"C": lambda m: m.stack.append(m.take(m.number(1))),
        b"B": lambda m: m.stack.append(m.take(m.number(4))),
        b"\x8e": lambda m: m.stack.append(m.take(m.number(8))),
        b")": lambda m: m.stack.append(()),
        b"\x85": lambda m: m.tuple_of(1),
        b"\x86": lambda m: m.tuple_of(2),
        b"\x87": lambda m: m.tuple_of(3),
        b"t": lambda m: m.made(tuple(m.since_mark())),
        b"]": lambda m: m.made([]),
        b"}": lambda m: m.made(Pairs()),
        b"a": _Machine.append,
        b"e": _Machine.appends,
        b"s": _Machine.setitem,
        b"u": _Machine.setitems,
        b"c": _Machine.global_,
        b"\x93": _Machine.stack_global,
        b"R": _Machine.call,
        b"\x81": _Machine.call,  # of a class, whose __init__ is left out: what is called is not looked at here
        b"b": _Machine.build,
        b"Q": _Machine.reference,
    }.items()
}
