"""What the examples of training train: a small decoder on sequences that count, some of which end early.

Also what one process makes of it, for them to compare with.
"""

import argparse
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

import longring as lr
from longring.models import Decoder, DecoderConfig
from longring.nn import cross_entropy, next_tokens

TOKENS, WORDS, STEPS = 257, 32, 3  # an odd number: parts of a sequence need not be equal
CONFIG = DecoderConfig(vocab_size=WORDS, dim=64, layers=2, heads=4, kv_heads=2)


def new_model() -> Decoder:
    torch.manual_seed(0)  # the same weights on every rank
    return Decoder(CONFIG)


def new_optimiser(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Not Adam, which takes gradients that are all too large for right ones: this is to show that they are right."""
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def sequence(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, what they are to predict), each [tokens]. Shifted before anything is dealt."""
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(1, 3, (1, TOKENS), generator=draw).cumsum(1) % WORDS
    return tokens[0], next_tokens(tokens, lengths=[TOKENS - 50 * (number % 3)])[0]


def sequences(numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of them, each [batch, tokens]."""
    tokens, targets = zip(*map(sequence, numbers), strict=True)
    return torch.stack(tokens), torch.stack(targets)


def losses_alone(rows: int) -> list[float]:
    """Whole sequences, so many in each step, in this process alone."""
    model = new_model()
    optimiser = new_optimiser(model)
    losses = []
    for step in range(STEPS):
        tokens, targets = sequences(range(step * rows, (step + 1) * rows))
        loss = cross_entropy(model(tokens), targets)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def main(program: Callable[[int, int], list[float]], about: str | None) -> None:
    """Run program(data, context) on that many ranks, or as one of those that somebody started, and compare."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, default=2, help="how many rings, each with sequences of its own")
    parser.add_argument("--context", type=int, default=2, help="how many ranks a ring has")
    asked = parser.parse_args()

    results = lr.launch(program, asked.data, asked.context, ranks=asked.data * asked.context)
    if int(os.environ.get("RANK", 0)) == 0:
        expected = losses_alone(asked.data)
        for step, (found, alone) in enumerate(zip(results[0], expected, strict=True)):
            print(f"step {step}: loss {found:.6f}, of one process {alone:.6f}")
        if any(abs(a - b) > 1e-4 for a, b in zip(results[0], expected, strict=True)):
            sys.exit("the ranks and one process differ")


def device() -> torch.device:
    """This rank's GPU where there is one for each rank of the machine, or the CPU."""
    is_nccl = "nccl" in str(dist.get_backend_config())
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
