"""A stock Llama trained by the Trainer of transformers, every sequence dealt over all ranks: the same losses anywhere.

python examples/transformers_trainer.py                                      # this process alone
python examples/transformers_trainer.py --ranks 2                            # two local processes
torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py    # the same, by torchrun
"""

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import longring as lr
from longring.integrations.transformers import register, shard_batch, sharded
from longring.nn.loss import cross_entropy

VOCABULARY, TOKENS, EXAMPLES = 61, 201, 16


class LongTrainer(Trainer):
    """All ranks read the same examples, and each holds its part of every one of them."""

    loss_is_scaled_for_ga = False  # a mean over this batch

    def get_train_dataloader(self) -> DataLoader:
        """The Trainer's own would deal other examples to every rank."""
        order = torch.Generator().manual_seed(self.args.seed)
        return DataLoader(
            self.train_dataset,
            self.args.per_device_train_batch_size,
            shuffle=True,
            generator=order,
            collate_fn=self.data_collator,
        )

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        group = dist.group.WORLD if dist.is_initialized() else None
        sharding = lr.Sharding(inputs["input_ids"].shape[1], group, "zigzag")
        batch = shard_batch(sharding=sharding, **inputs)
        with sharded(batch):
            outputs = model(**batch.inputs)
        # DistributedDataParallel, in which the Trainer wraps the model, averages gradients over the ranks
        loss = cross_entropy(outputs.logits, batch.targets, sharding=sharding, gradients="mean")
        return (loss, outputs) if return_outputs else loss


def examples() -> list[dict[str, torch.Tensor]]:
    """Sequences that count up, each from a number of its own; the last few tokens of some are padding."""
    counts = torch.arange(TOKENS)
    made = [{"input_ids": (counts + 7 * number) % VOCABULARY} for number in range(EXAMPLES)]
    for number, example in enumerate(made):
        example["attention_mask"] = (counts < TOKENS - 3 * number).long()
    return made


def program(steps: int) -> list[float]:
    """What each rank runs: the loss of every step."""
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="longring")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=steps,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            gradient_checkpointing=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            ddp_find_unused_parameters=False,
        )
        trainer = LongTrainer(model=model, args=arguments, train_dataset=examples())  # type: ignore[arg-type]
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="start so many local processes; under torchrun, leave it out")
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 0)) or asked.ranks
    losses = lr.launch(program, asked.steps, ranks=ranks)[0] if ranks else program(asked.steps)
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{TOKENS} tokens on {ranks or 1} ranks")
        for step, loss in enumerate(losses, 1):
            print(f"step {step} loss {loss:.5f}")


if __name__ == "__main__":
    main()
