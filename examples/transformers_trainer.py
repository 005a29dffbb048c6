"""A stock Llama trained by the Trainer of transformers, every sequence dealt over all ranks: the same losses anywhere.

python examples/transformers_trainer.py                                      # this process alone
python examples/transformers_trainer.py --ranks 2                            # two local processes
torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py    # the same, by torchrun
"""

import argparse
import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import longring as lr
from longring.integrations.transformers import register
from longring.integrations.transformers_trainer import ContextParallelMixin

VOCABULARY, TOKENS, EXAMPLES = 61, 201, 16


class LongTrainer(ContextParallelMixin, Trainer):
    """Every sequence is sharded over all ranks, in train, evaluate and predict."""


def examples() -> list[dict[str, torch.Tensor]]:
    """Sequences that count up, each from a number of its own; the last few tokens of some are padding."""
    counts = torch.arange(TOKENS)
    made = [{"input_ids": (counts + 7 * number) % VOCABULARY} for number in range(EXAMPLES)]
    for number, example in enumerate(made):
        is_token = counts < TOKENS - 3 * number
        example["attention_mask"] = is_token.long()
        example["labels"] = example["input_ids"].where(is_token, -100)  # as collators of transformers mark padding
    return made


def program(steps: int) -> tuple[list[float], float]:
    """What each rank runs: the loss of every step, and that of the evaluation at the end."""
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
            per_device_eval_batch_size=3,
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
        data = examples()
        trainer = LongTrainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)  # type: ignore[arg-type]
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], evaluated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="start so many local processes; under torchrun, leave it out")
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 0)) or asked.ranks
    losses, evaluated = lr.launch(program, asked.steps, ranks=ranks)[0] if ranks else program(asked.steps)
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{TOKENS} tokens on {ranks or 1} ranks")
        for step, loss in enumerate(losses, 1):
            print(f"step {step} loss {loss:.5f}")
        print(f"evaluation loss {evaluated:.5f}")


if __name__ == "__main__":
    main()
