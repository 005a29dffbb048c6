"""A code base as one sequence: what was written before, and where?

python examples/code_base.py                                  # asyncio of the Python that runs this, on two local ranks
python examples/code_base.py src/longring --ranks 4           # any folder of Python files
torchrun --standalone --nproc-per-node 2 examples/code_base.py

All files are laid end to end, and one causal ring attention goes over the whole. A query is made of the last eight
tokens, a key of the eight tokens before its place, so that attention finds where the same words stood before: what the
induction heads of a trained model do, made by hand. What it finds there is its guess at the next token.
"""

import argparse
import asyncio
import os
import re
import time
from bisect import bisect
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import longring as lr

LAGS, WIDTH = 8, 16  # tokens that are compared, and numbers for each
D = LAGS * WIDTH
BITS = 20  # of a position
SHARPNESS = 8.0
REACHES = (256, 2048, 16384)  # tokens; and the whole code base


class Code(NamedTuple):
    """Files laid end to end: words, symbols and line ends, numbered; and where each file begins."""

    names: list[str]
    starts: list[int]
    words: list[str]
    tokens: Tensor  # [n]

    def place(self, token: int) -> str:
        """A token's file and line."""
        file = bisect(self.starts, token) - 1
        return f"{self.names[file]}:{1 + sum(word[0] == chr(10) for word in self.words[self.starts[file] : token])}"


def read(folder: Path, most: int) -> Code:
    names, starts, words = [], [], []
    for path in sorted(folder.rglob("*.py")):
        names.append(str(path.relative_to(folder)))
        starts.append(len(words))
        words += re.findall(r"\w+|\n *|[^\w\s]", path.read_text(encoding="utf-8"))
        if len(words) >= most:
            break
    words = words[:most]
    number = {word: i for i, word in enumerate(dict.fromkeys(words))}
    return Code(names, starts, words, torch.tensor([number[word] for word in words]))


def lookup(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [1, n, 1, D], and the table by which an answer is read: signs drawn for each token."""
    n, words = len(tokens), int(tokens.max()) + 1
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2, (words, WIDTH), generator=draw) * 2.0 - 1
    table = torch.randint(0, 2, (words, D - BITS), generator=draw) * 2.0 - 1
    recent = torch.arange(LAGS, 0, -1) / (LAGS + 1) * 2  # the last token counts most
    context = torch.zeros(n + 1, LAGS, WIDTH)  # row i: the tokens before token i, the last first
    for lag in range(LAGS):
        context[lag + 1 :, lag] = codes[tokens[: n - lag]] * (recent[lag] / WIDTH).sqrt()
    q, k = context[1:].reshape(1, n, 1, D), context[:-1].reshape(1, n, 1, D)
    bits = (torch.arange(n)[:, None] >> torch.arange(BITS)) % 2 * 2.0 - 1
    v = torch.cat([table[tokens], bits], dim=1).reshape(1, n, 1, D)
    return q, k, v, table


class Answer(NamedTuple):
    reach: int
    guesses: Tensor  # [n]: which token is expected after each
    places: Tensor  # [n]: and where that one was found
    seconds: float


def program(tokens: Tensor, reaches: list[int]) -> list[Answer]:
    """What each rank runs; it gives the answers of all of them."""
    return [answer(tokens, reach) for reach in reaches]


def answer(tokens: Tensor, reach: int) -> Answer:
    began, n = time.perf_counter(), len(tokens)
    pattern = lr.Dense(window=(reach - 1, 0) if reach < n else None)
    s = lr.Sharding(length=n, group=dist.group.WORLD, layout="auto", pattern=pattern)
    q, k, v, table = lookup(tokens)
    out = lr.attention(s.shard(q), s.shard(k), s.shard(v), pattern=pattern, sharding=s, scale=SHARPNESS)[0, :, 0]
    guesses = torch.cat([(part @ table.T).argmax(dim=1) for part in out[:, : D - BITS].split(1024)])
    places = ((out[:, D - BITS :] > 0) << torch.arange(BITS)).sum(dim=1)
    whole = s.unshard(torch.stack([guesses, places]))
    return Answer(reach, *whole, time.perf_counter() - began)


def passages(code: Code, places: Tensor) -> list[tuple[int, int, int]]:
    """(length, here, there) of the longest that stood before, found by attention and checked word by word."""
    words, found = code.words, []
    for here in range(LAGS, len(words) - 1):
        there = int(places[here]) - 1  # the token before the one that was taken for the next
        length = 0
        while length <= there < here - length and words[here - length] == words[there - length]:
            length += 1
        found.append((length, here, there))
    best: list[tuple[int, int, int]] = []
    for length, here, there in sorted(found, reverse=True):
        if all(abs(here - other) > length for _, other, _ in best):
            best.append((length, here, there))
        if len(best) == 3:
            break
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(asyncio.__file__).parent)
    parser.add_argument("--tokens", type=int, default=49152, help="at most")
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()

    code = read(asked.folder, asked.tokens)
    n = len(code.tokens)
    reaches = [*(reach for reach in REACHES if reach < n), n]
    answers = lr.launch(program, code.tokens, reaches, ranks=asked.ranks, backend="gloo")[0]
    if int(os.environ.get("RANK", 0)) > 0:
        return
    print(f"{asked.folder.name}: {len(code.names)} files as one sequence of {n:,} tokens, by causal ring attention\n")
    print("looking back   next token found there     seconds")
    for found in answers:
        right = (found.guesses[:-1] == code.tokens[1:]).double().mean().item()
        print(f"{found.reach:>12,}   {right:>22.1%}   {found.seconds:>9.1f}")
    print("\nThe longest passages that stood before, word for word, as attention over all found them:")
    for length, here, there in passages(code, answers[-1].places):
        passage = code.words[here - length + 1 : here + 1]
        blank = next((i for i, word in enumerate(passage) if word.strip()), 0)  # line ends that it begins with
        first, second = (code.place(end - length + 1 + blank) for end in (here, there))
        text = " ".join(word for word in passage[:16] if word.strip())
        print(f"  {length:,} tokens, {here - there:,} back: {first} as in {second}: {text} ...")


if __name__ == "__main__":
    main()
