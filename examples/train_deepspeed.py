"""Training over data x context ranks with DeepSpeed's ZeRO 3, and rings that deal the tokens.

python examples/train_deepspeed.py                                      # 2 x 2 local processes
torchrun --standalone --nproc-per-node 4 examples/train_deepspeed.py    # or
deepspeed --no_local_rank --num_gpus 4 examples/train_deepspeed.py
"""

import deepspeed
from task import STEPS, TOKENS, device, main, new_model, new_optimiser, sequences
from torch.distributed.device_mesh import init_device_mesh

import longring as lr
from longring.integrations.deepspeed import backward
from longring.nn import cross_entropy

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,  # left out, it is 1
}


def program(data: int, context: int) -> list[float]:
    """What each rank runs; the losses it saw, which are the same on all."""
    here = device()
    if here.type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}  # or it compiles a collective of its own first, for a minute
    mesh = init_device_mesh(here.type, (data, context), mesh_dim_names=("data", "context"))
    model = new_model().to(here)
    engine, *_ = deepspeed.initialize(model=model, optimizer=new_optimiser(model), config=CONFIG)

    s = lr.Sharding(length=TOKENS, group=mesh["context"], layout="zigzag")
    losses = []
    for step in range(STEPS):
        number = step * data + mesh.get_local_rank("data")
        tokens, targets = (s.shard(x.to(here)) for x in sequences(range(number, number + 1)))
        logits = engine(tokens, sharding=s)
        loss = cross_entropy(logits, targets, sharding=s, group=mesh, gradients="mean")
        backward(engine, loss, group=mesh)
        engine.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main(program, __doc__)
