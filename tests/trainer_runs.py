"""What the Trainer of transformers computes: stock with sdpa in one process, and by longring over ranks.

`of_stock` and `of_ranks` are found by name in processes of their own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import transformers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from longring.integrations.transformers import register
from longring.integrations.transformers_trainer import ContextParallelMixin

VOCABULARY, LENGTH, EXAMPLES, BATCH = 37, 23, 11, 4  # the last batch holds 3
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class LongTrainer(ContextParallelMixin, Trainer):
    attention_options = {"timeout": 60.0}  # noqa: RUF012


class PairTrainer(LongTrainer):
    context_parallel_size = 2


class Outcome(NamedTuple):
    losses: list[float]  # of each logged step, with the norm of the gradient
    metrics: dict[str, float]  # of each evaluation, by step and name
    predictions: Any
    label_ids: Any
    unlabelled: Any  # predictions for examples without labels
    weights: dict[str, torch.Tensor]


# ------------------------------------------------------------------------------------------------------------- data


def examples(kind: str) -> list[dict[str, torch.Tensor]]:
    """Sequences of one length or of several; of some tokens nothing is to be learned."""
    draw = torch.Generator().manual_seed(7)
    made = []
    for number in range(EXAMPLES):
        length = LENGTH if kind in ("equal", "packed") else 5 + 2 * number
        ids = torch.randint(VOCABULARY, (length,), generator=draw)
        labels = ids.where(torch.arange(length) >= number % 4, -100)
        made.append({"input_ids": ids, "labels": labels})
        if kind == "packed":
            positions = torch.arange(length)
            cut = 3 + number
            made[-1]["position_ids"] = torch.cat([positions[:cut], positions[: length - cut]])
            labels[cut] = -100
    return made


def collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Padded on the right; what is as long as the others needs no mask."""
    lengths = [len(row["input_ids"]) for row in rows]
    n = max(lengths)
    fill = {"labels": -100, "input_ids": 0}
    batch = {
        name: torch.stack(
            [torch.nn.functional.pad(row[name], (0, n - len(row[name])), value=fill[name]) for row in rows]
        )
        for name in rows[0]
        if name in fill
    }
    if "position_ids" in rows[0]:
        batch["position_ids"] = torch.stack([row["position_ids"] for row in rows])
    elif min(lengths) < n:
        batch["attention_mask"] = (torch.arange(n) < torch.tensor(lengths)[:, None]).long()
    return batch


# ----------------------------------------------------------------------------------------------------------- runs


CASES: dict[str, dict[str, Any]] = {
    "unequal, accumulated": {"gradient_accumulation_steps": 2},
    "packed": {"gradient_checkpointing": True},
    "bert, unequal": {"gradient_accumulation_steps": 1},
    "equal, the best": {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_right",
        "save_strategy": "steps",
        "save_steps": 2,
    },
}


RESUMES = not transformers.__version__.startswith("5.8.")  # which cannot load an optimizer onto "cpu:0"
SEVERAL_ROWS = ["unequal, accumulated", "equal, the best"]  # BERT's own loss is no mean over the tokens of all rows


def model(name: str, attention: str) -> Any:
    register()
    torch.manual_seed(3)
    if name.startswith("bert"):
        return BertForMaskedLM._from_config(BertConfig(**SIZES, **NO_DROPOUT), attn_implementation=attention)
    return LlamaForCausalLM._from_config(LlamaConfig(**SIZES, num_key_value_heads=2), attn_implementation=attention)


def measured(found: Any) -> dict[str, float]:
    """Of all tokens that are to be predicted, and of where the logits stand."""
    logits, labels = found.predictions[:, :-1], found.label_ids[:, 1:]
    counts = labels != -100
    right = (logits.argmax(-1) == labels)[counts].mean()
    places = np.arange(logits.shape[1])[None, :, None]
    return {"right": float(right), "placed": float((np.where(logits == -100, 0, logits) * places).mean())}


def trainer(kind: Any, name: str, attention: str, folder: str, **changes: Any) -> Any:
    arguments = {
        "output_dir": folder,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "num_train_epochs": 2,
        "learning_rate": 0.05,
        "optim": "sgd",  # of Adam's first steps only the sign of a gradient matters, be it of rounding
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_find_unused_parameters": False,
        **changes,
    }
    data = examples(name.removeprefix("bert, ").partition(",")[0])
    made = kind(
        model=model(name, attention),
        args=TrainingArguments(**arguments),
        train_dataset=data,
        eval_dataset=data[::-1],
        data_collator=collated,
        compute_metrics=measured,
    )
    made.remove_callback(PrinterCallback)
    return made


def ran(kind: Any, name: str, attention: str) -> Outcome:
    with tempfile.TemporaryDirectory() as own:
        made = trainer(kind, name, attention, _shared(own), **CASES[name])
        if name == "packed":  # also before training, which must not keep the model from being wrapped
            made.evaluate()
        made.train()
        data = made.train_dataset
        found = made.predict(data)
        unlabelled = made.predict([{k: x for k, x in row.items() if k != "labels"} for row in data])
        made.evaluate()
        history = made.state.log_history
        _wait()
    losses = [row[key] for row in history for key in ("loss", "grad_norm") if key in row]
    metrics = {
        f"{row['step']} {key} {number}": value
        for number, row in enumerate(history)
        for key, value in row.items()
        if key in ("eval_loss", "eval_right", "eval_placed")
    }
    metrics |= {key: found.metrics[key] for key in ("test_loss", "test_right", "test_placed")}
    weights = {key: x.detach().clone() for key, x in made.model.state_dict().items()}
    return Outcome(losses, metrics, found.predictions, found.label_ids, unlabelled.predictions, weights)


def _shared(own: str) -> str:
    """One folder for the checkpoints of all ranks, as on one machine."""
    if not dist.is_initialized():
        return own
    names = [own]
    dist.broadcast_object_list(names)
    return names[0]


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def of_stock(names: list[str]) -> list[Outcome]:
    """By transformers and torch alone, in this process or over data parallel ones."""
    torch.set_num_threads(1)
    return [ran(Trainer, name, "sdpa") for name in names]


def of_two_ranks() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "sharded": {name: ran(LongTrainer, name, "longring") for name in CASES},
        "data parallel": dict(zip(SEVERAL_ROWS, of_stock(SEVERAL_ROWS), strict=True)),
        "resumed": resumed() if RESUMES else None,
        "rank of workers": rank_of_workers(),
        "refused": [refused(number) for number in range(len(REFUSED))],
    }


def of_four_ranks() -> dict[str, Any]:
    torch.set_num_threads(1)
    few = ["unequal, accumulated", "bert, unequal"]
    return {
        "sharded": {name: ran(LongTrainer, name, "longring") for name in few},
        "data and context parallel": {name: ran(PairTrainer, name, "longring") for name in SEVERAL_ROWS},
    }


# ------------------------------------------------------------------------------------------------- saved and resumed


class Stopping(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 3


def rank_of_workers() -> int:
    """With which the Trainer seeds the processes that load data, and draw where the collator does."""
    with tempfile.TemporaryDirectory() as own:
        made = trainer(LongTrainer, "equal", "longring", own, dataloader_num_workers=1)
        return made.get_train_dataloader().worker_init_fn.keywords["rank"]


REFUSED: list[tuple[str, dict[str, Any]]] = [  # a part of the message, and what is asked for
    ("label_smoothing_factor is not built", {"label_smoothing_factor": 0.1}),
    ("compute_loss_func is not built", {"compute_loss_func": lambda *given, **more: None}),
    ("output_router_logits=True", {"router": True}),
    ("computes its loss by another", {"loss": "another"}),
    ("got token_type_ids; override shard_inputs", {"more": {"token_type_ids": torch.zeros(LENGTH, dtype=torch.int64)}}),
    ("position_ids must count up by one", {"more": {"position_ids": 2 * torch.arange(LENGTH)}}),
    ("position_ids must be [batch, n] and begin at 0", {"more": {"position_ids": 1 + torch.arange(LENGTH)}}),
    ("a batch without labels has no loss", {"without": "labels"}),
    ("dispatch_batches=True is not built", {"accelerator_config": {"dispatch_batches": True}}),
    ("eval_use_gather_object=True is not built", {"eval_use_gather_object": True}),
    ("context_parallel_size must divide the 2 processes, got 3", {"size": 3}),
    ("OwnLoss.compute_loss would never be called", {"own_loss": True}),
    ("neftune_noise_alpha is not built", {"neftune_noise_alpha": 5.0}),
]


class OwnLoss(Trainer):
    def compute_loss(self, *given: Any, **more: Any) -> Any:
        return 2 * super().compute_loss(*given, **more)


def refused(number: int) -> str:
    """What this rank raises."""
    asked = dict(REFUSED[number][1])
    more, without = asked.pop("more", {}), asked.pop("without", "")
    loss, router, size = asked.pop("loss", None), asked.pop("router", False), asked.pop("size", None)
    bases = (ContextParallelMixin, OwnLoss) if asked.pop("own_loss", False) else (LongTrainer,)
    kind = type("Asking", bases, {"context_parallel_size": size})
    with tempfile.TemporaryDirectory() as own:
        try:
            function = asked.pop("compute_loss_func", None)
            made = trainer(kind, "equal", "longring", own, **asked)
            made.compute_loss_func = function
            made.model.config.output_router_logits = router
            if loss is not None:
                made.model.loss_function = type(loss, (), {"__name__": loss})()
            rows = [{**row, **more} for row in examples("equal")[:2]]
            batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != without}
            made.compute_loss(made.model, batch)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def resumed() -> tuple[list[float], list[float]]:
    """Losses of training that goes through, and of the rest after a stop in the midst of an epoch."""
    torch.set_num_threads(1)
    changes = {
        "save_strategy": "steps",
        "save_steps": 3,
        "optim": "adamw_torch",
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "eval_strategy": "no",
    }
    with tempfile.TemporaryDirectory() as own:
        folder = _shared(own)
        whole = trainer(LongTrainer, "unequal", "longring", f"{folder}/whole", **changes)
        whole.train()
        first = trainer(LongTrainer, "unequal", "longring", f"{folder}/parts", **changes)
        first.add_callback(Stopping())
        first.train()
        _wait()
        assert (Path(folder) / "parts" / "checkpoint-3").is_dir()
        rest = trainer(LongTrainer, "unequal", "longring", f"{folder}/parts", **changes)
        rest.train(resume_from_checkpoint=True)
        _wait()
    return tuple([row["loss"] for row in made.state.log_history if "loss" in row] for made in (whole, rest))  # type: ignore[return-value]
