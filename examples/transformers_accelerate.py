"""A stock Mistral trained with Accelerate: sequences over rows of ranks, each dealt over the ranks of its row.

python examples/transformers_accelerate.py                                      # this process alone
python examples/transformers_accelerate.py --ranks 4                            # four local processes: 2 rows of 2
torchrun --standalone --nproc-per-node 4 examples/transformers_accelerate.py    # the same, by torchrun

The losses are the same each time: that of a step is the mean over all tokens of all sequences, long or short.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import MistralConfig, MistralForCausalLM

import longring as lr
from longring.integrations.transformers import register, shard_batch, sharded
from longring.nn.loss import cross_entropy

VOCABULARY, WINDOW = 61, 64
LENGTHS = (301, 203)  # of the two sequences of a step


def program(steps: int) -> list[float]:
    """What each rank runs: the loss of every step."""
    register()
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=WINDOW,
    )
    accelerator = Accelerator(cpu=True)
    model = MistralForCausalLM._from_config(config, attn_implementation="longring")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    sequences, places = dealt_to_rows()
    losses = []
    for _ in range(steps):
        loss = loss_of(model, sequences, **places)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def dealt_to_rows() -> tuple[torch.Tensor, dict[str, Any]]:
    """This row's sequence, its ranks, and all ranks; or, alone, both sequences packed into one."""
    if not dist.is_initialized():
        return sequence(0, 1), {"documents": [0, LENGTHS[0], sum(LENGTHS)]}
    ranks = dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "context"))
    return sequence(ranks.get_local_rank("data")), {"row": ranks["context"], "everybody": ranks}


def loss_of(
    model: Any, tokens: torch.Tensor, *, documents: Any = None, row: Any = None, everybody: Any = None
) -> torch.Tensor:
    """Attention is over the ranks of a row, the mean over everybody: so every token weighs the same."""
    sharding = lr.Sharding(tokens.shape[1], row, "contiguous")  # a window reaches no further than the neighbour
    batch = shard_batch(tokens, sharding, documents=documents)
    with sharded(batch):
        logits = model(**batch.inputs, use_cache=False).logits
    # DistributedDataParallel, in which prepare wraps the model, averages gradients over everybody
    return cross_entropy(logits, batch.targets, sharding=sharding, group=everybody, gradients="mean")


def sequence(*numbers: int) -> torch.Tensor:
    """[1, tokens]: these sequences one behind the other, each of which counts up by a step of its own."""
    parts = [(number + 1) * torch.arange(LENGTHS[number]) % VOCABULARY for number in numbers]
    return torch.cat(parts).unsqueeze(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="start so many local processes, an even number of them")
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 0)) or asked.ranks
    losses = lr.launch(program, asked.steps, ranks=ranks)[0] if ranks else program(asked.steps)
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{sum(LENGTHS)} tokens on {ranks or 1} ranks")
        for step, loss in enumerate(losses, 1):
            print(f"step {step} loss {loss:.5f}")


if __name__ == "__main__":
    main()
