"""Ring attention, forward and backward: alone, on local ranks, or on any number of machines, with the same numbers.

python examples/ring.py                                      # this process alone
python examples/ring.py --ranks 4                            # four local processes
torchrun --standalone --nproc-per-node 4 examples/ring.py    # the same, by torchrun

On each of several machines, the first of which is called node0; on the second with --node-rank 1:

torchrun --nnodes 2 --node-rank 0 --master-addr node0 --master-port 29500 --nproc-per-node 2 examples/ring.py
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist

import longring as lr

HEADS, KV_HEADS, D = 8, 2, 64


def program(tokens: int) -> dict[str, tuple[float, float]]:
    """What each rank runs. Without a group it is the whole ring."""
    group = dist.group.WORLD if dist.is_initialized() else None
    q, k, v, dout = whole_sequence(tokens)

    sharding = lr.Sharding(length=tokens, group=group, layout="zigzag")
    mine = [sharding.shard(x).requires_grad_() for x in (q, k, v)]  # a real program loads only these
    out = lr.ring_attention(*mine, sharding=sharding)
    out.backward(sharding.shard(dout))

    ring = [sharding.unshard(x) for x in (out.detach(), *(x.grad for x in mine))]
    return {
        name: compared(*two) for name, *two in zip(("out", "dq", "dk", "dv"), ring, alone(q, k, v, dout), strict=True)
    }


def whole_sequence(tokens: int) -> list[torch.Tensor]:
    """The same random numbers on every rank, wherever it runs."""
    random = torch.Generator().manual_seed(0)
    shapes = [(1, tokens, heads, D) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(shape, generator=random).to(device()) for shape in shapes]


def device() -> torch.device:
    """A GPU of its own for every rank of this machine, or the CPU for all, as longring.launch chooses the backend."""
    has_its_own = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_its_own else torch.device("cpu")


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
    """The same attention in one process."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = lr.attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def compared(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """(its size, the largest difference as a share of the largest number)."""
    return found.double().norm().item(), ((found - expected).abs().max() / expected.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="start so many local processes; under torchrun, leave it out")
    parser.add_argument("--tokens", type=int, default=2001)
    asked = parser.parse_args()

    ranks = int(os.environ.get("WORLD_SIZE", 0)) or asked.ranks
    # Under torchrun launch starts nothing: it joins, and gives the result of this rank alone.
    results = lr.launch(program, asked.tokens, ranks=ranks) if ranks else [program(asked.tokens)]

    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{asked.tokens} tokens on {ranks or 1} ranks")
        for name, (size, error) in results[0].items():
            print(f"{name:4} norm {size:10.4f}   error against one process {error:.1e}")
    if not all(error < 1e-5 for result in results for _, error in result.values()):
        sys.exit("the ring and one process differ")


if __name__ == "__main__":
    main()
