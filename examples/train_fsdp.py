"""Training over data x context ranks: FSDP2 deals the parameters over all of them, rings deal the tokens.

python examples/train_fsdp.py                                      # 2 x 2 local processes
torchrun --standalone --nproc-per-node 4 examples/train_fsdp.py    # or several machines: --data times --context ranks
"""

from task import STEPS, TOKENS, device, main, new_model, new_optimiser, sequences
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import longring as lr
from longring.nn import cross_entropy


def program(data: int, context: int) -> list[float]:
    """What each rank runs; the losses it saw, which are the same on all."""
    here = device()
    mesh = init_device_mesh(here.type, (data, context), mesh_dim_names=("data", "context"))

    model = new_model().to(here)
    for layer in model.stack.layers:
        fully_shard(layer, mesh=mesh)  # over the ranks of a ring, and the same in every ring
    fully_shard(model, mesh=mesh)
    optimiser = new_optimiser(model)

    s = lr.Sharding(length=TOKENS, group=mesh["context"], layout="zigzag")
    losses = []
    for step in range(STEPS):
        number = step * data + mesh.get_local_rank("data")
        tokens, targets = (s.shard(x.to(here)) for x in sequences(range(number, number + 1)))
        logits = model(tokens, sharding=s)
        # one mean over all tokens of all rings, whose gradients FSDP2 averages
        loss = cross_entropy(logits, targets, sharding=s, group=mesh, gradients="mean")
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main(program, __doc__)
