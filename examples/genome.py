"""A genome as one sequence: how much of it is copied from far away, on either strand?

python examples/genome.py                                     # 49,152 letters, generated, on two local ranks
python examples/genome.py --fasta my.fa --letters 32768       # the beginning of a file's first sequence
torchrun --standalone --nproc-per-node 2 examples/genome.py

A query is made of the last 20 letters. Of two heads, the keys of one are the 20 letters before each place, and those of
the other the 20 letters there, backwards on the other strand; both foretell the letter that would come next. The heads
are merged by their lse, as if all keys had been under one softmax, and what no key resembles is a guess among four.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import longring as lr
from longring.train.corpus import open_corpus
from longring.train.fasta import write_fasta
from longring.train.generated import genome_like

LAGS, D = 20, 64  # three numbers a letter, and four that are 0
SHARPNESS = 2.0
UNSURE = 28.0  # the score of a resemblance that is worth as much as a guess: 17 of 20 letters have 32
CORNERS = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]) / 3**0.5  # of a tetrahedron: A, C, G, T


def read(path: Path, most: int) -> Tensor:
    """The letters of the first sequence, as 0 to 3; 3 - i pairs with i."""
    corpus = open_corpus(path, kind="fasta", case="upper")
    letters = torch.from_numpy(corpus.tokens(0, 0, min(most, int(corpus.lengths[0]))).copy())
    known = torch.tensor([ord(letter) for letter in "ACGT"], dtype=letters.dtype)
    return torch.bucketize(letters, known).clamp(max=3)  # and what is none of them passes for one


def lookup(letters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1, n, 2, D]: a head that reads forwards, and one that reads backwards on the other strand."""
    n = len(letters)
    q, k, v = torch.zeros(3, n, 2, D)
    for lag in range(LAGS):
        part = slice(3 * lag, 3 * lag + 3)
        q[lag:, :, part] = CORNERS[letters[: n - lag]][:, None]
        k[lag + 1 :, 0, part] = CORNERS[letters[: n - lag - 1]]
        back = LAGS - 1 - lag  # of the last letter of a place, the one that pairs with our last stands first
        k[back:, 1, part] = CORNERS[3 - letters[: n - back]]
    v[:, 0, :4] = torch.eye(4)[letters]
    v[LAGS:, 1, :4] = torch.eye(4)[3 - letters[: n - LAGS]]
    return q[None], k[None], v[None]


def program(letters: Tensor, patterns: dict[str, lr.Dense | lr.Dilated]) -> dict[str, tuple[float, float, float]]:
    """What each rank runs: by pattern bits a letter, of our strand alone and of both, and seconds."""
    return {name: measured(letters, pattern) for name, pattern in patterns.items()}


def measured(letters: Tensor, pattern: lr.Dense | lr.Dilated) -> tuple[float, float, float]:
    began = time.perf_counter()
    s = lr.Sharding(length=len(letters), group=dist.group.WORLD, layout="auto", pattern=pattern)
    q, k, v = (s.shard(x) for x in lookup(letters))
    out, lse = lr.attention(q, k, v, pattern=pattern, sharding=s, scale=SHARPNESS, return_lse=True)
    found, score = out[0, :, :, :4], lse[0].T  # [n, heads, 4], [n, heads]
    both = (score.softmax(dim=1)[:, :, None] * found).sum(dim=1)
    chances = [chance(found[:, 0], score[:, 0]), chance(both, score.logsumexp(dim=1))]
    ours, merged = (bits(s.unshard(p, dim=0), letters) for p in chances)
    return ours, merged, time.perf_counter() - began


def chance(p: Tensor, score: Tensor) -> Tensor:
    """What was found [n, 4], as far as its score makes it more than a guess."""
    return torch.lerp(torch.full_like(p, 0.25), p, torch.sigmoid(score - UNSURE)[:, None])


def looks(n: int) -> dict[str, lr.Dense | lr.Dilated]:
    reaches = [reach for reach in (1024, 4096, 16384) if reach < n]
    found: dict[str, lr.Dense | lr.Dilated] = {f"the last {w:,}": lr.Dense(window=(w - 1, 0)) for w in reaches}
    found["LongNet, thinned out"] = lr.Dilated(segment_lengths=[n // 32, n // 8, n], dilation_rates=[1, 4, 16])
    found["all before"] = lr.Dense()
    return found


def bits(p: Tensor, letters: Tensor) -> float:
    return -p[:-1].gather(1, letters[1:, None]).log2().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fasta", type=Path, help="a file of yours instead of a generated one")
    parser.add_argument("--letters", type=int, default=49152)
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = asked.fasta or Path(folder) / "generated.fa"
        if asked.fasta is None:
            write_fasta(path, [genome_like(asked.letters, seed=1)])
        letters = read(path, asked.letters)
    found = lr.launch(program, letters, looks(len(letters)), ranks=asked.ranks, backend="gloo")[0]
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{path.name}: {len(letters):,} letters as one sequence, over the ranks of a ring\n")
        print("bits a letter, of 2 for a guess among four")
        print("looking at             our strand   both strands   seconds")
        for name, (ours, both, seconds) in found.items():
            print(f"{name:<22} {ours:>10.2f} {both:>14.2f} {seconds:>9.1f}")


if __name__ == "__main__":
    main()
