"""A long document: a small model learns to read it, over ranks that share every passage.

python examples/long_document.py                              # Python's language reference, on two local ranks
python examples/long_document.py book.txt --steps 5000        # any text, and more time
torchrun --standalone --nproc-per-node 2 examples/long_document.py

The loop is a plain one. A passage is dealt over the ranks, attention is a ring, the loss is that of one process, and
gradients add up. The last tenth of the document is never learned from; there the model's bits for a byte are counted by
how many bytes it had read before, beside those of frequencies of bytes, and of bytes after each byte.
"""

import argparse
import math
import os
import time
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy as losses_of

import longring as lr
from longring.models import Decoder, DecoderConfig
from longring.nn import cross_entropy

CONFIG = DecoderConfig(vocab_size=256, dim=128, layers=2, heads=4, kv_heads=2)
RATE, WARMUP, BATCH = 3e-3, 20, 1
HELD_OUT = 8  # passages that are judged
PROMPT, NEW = 400, 100  # bytes


def passages(text: Tensor, context: int, starts: list[int]) -> tuple[Tensor, Tensor]:
    """(bytes, the bytes after them), each [passages, context]."""
    cut = torch.stack([text[start : start + context + 1] for start in starts])
    return cut[:, :-1], cut[:, 1:]


def program(text: Tensor, context: int, steps: int) -> tuple[Tensor, bytes, bytes, float]:
    """What each rank runs: bits by position, a prompt and how the model goes on from it, seconds of a step."""
    torch.manual_seed(0)  # the same weights, and the same passages, on every rank
    model = Decoder(CONFIG)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    s = lr.Sharding(length=context, group=dist.group.WORLD, layout="zigzag")
    learned = len(text) * 9 // 10
    began = time.perf_counter()
    for step in range(steps):
        starts = torch.randint(learned - context, (BATCH,)).tolist()
        tokens, targets = (s.shard(x) for x in passages(text, context, starts))
        loss = cross_entropy(model(tokens, sharding=s), targets, sharding=s)
        optimiser.zero_grad()
        loss.backward()
        add_up(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.param_groups[0]["lr"] = RATE * min((step + 1) / WARMUP, 1 - step / steps)
        optimiser.step()
    seconds = (time.perf_counter() - began) / steps
    with torch.no_grad():
        bits = judged(model, s, *passages(text, context, spread(learned, len(text) - context - 1)))
        prompt = text[learned : learned + PROMPT]
        part = lr.Sharding(length=PROMPT, group=dist.group.WORLD, layout="zigzag")
        new = model.generate(part.shard(prompt[None]), sharding=part, new_tokens=NEW, temperature=0.5, seed=0)
    return bits, bytes(prompt.tolist()), bytes(new[0].tolist()), seconds


def add_up(model: torch.nn.Module) -> None:
    """A rank's gradients are those of its own tokens: their sum is the gradient. DDP and FSDP2 do it faster."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def spread(start: int, stop: int) -> list[int]:
    return torch.linspace(start, stop, HELD_OUT).long().tolist()


def judged(model: Decoder, s: lr.Sharding, tokens: Tensor, targets: Tensor) -> Tensor:
    """Bits that each byte took, [passages, context], on every rank."""
    logits = model(s.shard(tokens), sharding=s)
    return s.unshard(losses_of(logits.transpose(1, 2), s.shard(targets), reduction="none")) / math.log(2)


def by_frequency(text: Tensor, context: int) -> tuple[float, float]:
    """Bits a byte on the same passages, by how often a byte is in the rest, and how often after the byte before."""
    learned = len(text) * 9 // 10
    pairs = torch.full((256, 256), 0.01)
    pairs.view(-1).index_add_(0, text[: learned - 1] * 256 + text[1:learned], torch.ones(learned - 1))
    tokens, targets = passages(text, context, spread(learned, len(text) - context - 1))
    alone, after = pairs.sum(dim=0) / pairs.sum(), pairs / pairs.sum(dim=1, keepdim=True)
    return -alone[targets].log2().mean().item(), -after[tokens, targets].log2().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path, nargs="?", help="instead of Python's language reference")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()

    document = asked.document.read_bytes() if asked.document else "\n".join(topics.values()).encode()
    text = torch.frombuffer(bytearray(document), dtype=torch.uint8).long()
    bits, prompt, new, seconds = lr.launch(program, text, asked.context, asked.steps, ranks=asked.ranks)[0]
    if int(os.environ.get("RANK", 0)) > 0:
        return
    name = asked.document.name if asked.document else "Python's language reference"
    steps = f"{asked.steps} steps of {BATCH} x {asked.context:,} bytes, {seconds:.2f} s each"
    print(f"{name}: {len(text):,} bytes; {steps}\n")
    print("bits a byte, in the tenth that was not learned from")
    alone, after = by_frequency(text, asked.context)
    print(f"  {'by how often each is':<36} {alone:.2f}\n  {'by how often after the one before':<36} {after:.2f}")
    edges = [*(edge for edge in (0, 16, 64, 256, 1024, 4096, 16384) if edge < asked.context), asked.context]
    for low, high in pairwise(edges):
        print(f"  {f'the model, {low:,} to {high - 1:,} bytes read':<36} {bits[:, low:high].mean():.2f}")
    print(f"\n...{prompt[-80:].decode(errors='replace')!r}\ngoes on, says the model: {new.decode(errors='replace')!r}")


if __name__ == "__main__":
    main()
