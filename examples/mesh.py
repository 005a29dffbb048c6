"""Data parallel rings: on a mesh of 2 x 2 ranks, two rings of two ranks each, with a sequence of their own.

python examples/mesh.py                                      # four local processes
torchrun --standalone --nproc-per-node 4 examples/mesh.py    # or several machines: --data times --context ranks in all
"""

import argparse
import sys
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh

import longring as lr

TOKENS, HEADS, D = 1001, 4, 32


class Report(NamedTuple):
    sequence: int
    rank_in_ring: int
    tokens_here: int
    error: float


def program(data: int, context: int) -> Report:
    """What each rank runs: its row of the mesh is a ring, and knows nothing of the others."""
    mesh = init_device_mesh("cpu", (data, context), mesh_dim_names=("data", "context"))
    sequence = mesh.get_local_rank("data")
    q, k, v = torch.randn(3, 1, TOKENS, HEADS, D, generator=torch.Generator().manual_seed(sequence))

    sharding = lr.Sharding(length=TOKENS, group=mesh["context"], layout="zigzag")
    mine = [sharding.shard(x).requires_grad_() for x in (q, k, v)]
    out = lr.ring_attention(*mine, sharding=sharding)
    out.sum().backward()

    ring = [sharding.unshard(x) for x in (out.detach(), *(x.grad for x in mine))]
    errors = [difference(found, expected) for found, expected in zip(ring, alone(q, k, v), strict=True)]
    return Report(sequence, mesh.get_local_rank("context"), out.shape[1], max(errors))


def alone(*qkv: torch.Tensor) -> list[torch.Tensor]:
    """The same attention in one process."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = lr.attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, default=2, help="how many rings")
    parser.add_argument("--context", type=int, default=2, help="how many ranks a ring has")
    asked = parser.parse_args()

    reports = lr.launch(program, asked.data, asked.context, ranks=asked.data * asked.context, backend="gloo")
    for report in reports:  # under torchrun, of this rank alone
        print(
            f"sequence {report.sequence}, rank {report.rank_in_ring} of its ring, {report.tokens_here} tokens: "
            f"error against one process {report.error:.1e}"
        )
    if not all(report.error < 1e-5 for report in reports):
        sys.exit("a ring and one process differ")


if __name__ == "__main__":
    main()
