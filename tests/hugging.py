"""Tiny stock models of transformers: what one process computes by `sdpa`, and ranks by longring."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import longring as lr
from longring.integrations.transformers import register, shard_batch, sharded
from longring.nn.loss import cross_entropy, next_tokens

LENGTH, BATCH, VOCABULARY, WINDOW = 29, 2, 37, 7
DOCUMENTS = [[0, 5, 6, 20, LENGTH], [0, 17, LENGTH]]
LENGTHS = [LENGTH, 19]
TIMEOUT = 60.0
_one_at_a_time = threading.Lock()  # ranks that are threads draw from one source of random numbers

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,  # at the usual 0.02 all scores are nearly equal
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "pad_token_id": None}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, GROUPED),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, GROUPED),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**GROUPED, "head_dim": 8}),
    "mistral": (MistralForCausalLM, MistralConfig, {**GROUPED, "sliding_window": WINDOW}),
    "mixed": (  # one layer sees everything, the other a window
        Qwen2ForCausalLM,
        Qwen2Config,
        {**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {**SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "bert": (
        BertForMaskedLM,
        BertConfig,
        {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": None},
    ),
}


@dataclass(frozen=True)
class Case:
    model: str
    data: str = "plain"  # or "padded", "packed"
    layout: str = "zigzag"
    dtype: torch.dtype = torch.float64
    checkpointing: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}, {self.data}, {self.layout}, {str(self.dtype).removeprefix('torch.')}"


class Outcome(NamedTuple):
    logits: Tensor  # of the whole sequence
    loss: float
    gradients: dict[str, Tensor]  # on ranks, this rank's part


def model(name: str, attention: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The same weights each time."""
    register()
    kind, config, sizes = MODELS[name]
    with _one_at_a_time:
        torch.manual_seed(3)
        made = kind._from_config(config(**{**sizes, **changes}), attn_implementation=attention).to(dtype).train()
    return _without_narrow_norms(made) if dtype == torch.float64 else made


def _without_narrow_norms(made: torch.nn.Module) -> Any:
    """The RMS norms of transformers round to float32 in between, where the last bit of float64 may tip the scales."""
    for module in list(made.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                wide = torch.nn.RMSNorm(child.weight.shape, child.variance_epsilon, dtype=torch.float64)
                wide.weight = child.weight
                setattr(module, name, wide)
    return made


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))


def padding() -> Tensor:
    return (torch.arange(LENGTH) < torch.tensor(LENGTHS).unsqueeze(1)).long()


def given(case: Case) -> dict[str, Any]:
    """What shard_batch is told of the data."""
    return {"padded": {"attention_mask": padding()}, "packed": {"documents": DOCUMENTS}}.get(case.data, {})


def inputs(case: Case) -> dict[str, Any]:
    """What a model is told of the data in one process."""
    if case.data == "padded":
        return {"attention_mask": padding()}
    if case.data == "packed" and case.model == "bert":  # which does not look for restarts
        documents = _documents_of_tokens()
        mask = documents.unsqueeze(1) == documents.unsqueeze(2)
        return {"attention_mask": mask.unsqueeze(1), "position_ids": restarting()}
    return {"position_ids": restarting(), "use_cache": False} if case.data == "packed" else {}


def _documents_of_tokens() -> Tensor:
    ends = [torch.tensor(row[1:]) for row in DOCUMENTS]
    return torch.stack([torch.searchsorted(row, torch.arange(LENGTH), right=True) for row in ends])


def restarting() -> Tensor:
    starts = [torch.tensor(row) for row in DOCUMENTS]
    numbers = _documents_of_tokens()
    return torch.stack([torch.arange(LENGTH) - start[number] for start, number in zip(starts, numbers, strict=True)])


def of_one_process(case: Case, attention: str = "sdpa") -> Outcome:
    """By torch alone, the loss included."""
    made = model(case.model, attention, case.dtype)
    logits = made(tokens(), **inputs(case)).logits
    targets = next_tokens(
        tokens(),
        documents=DOCUMENTS if case.data == "packed" else None,
        lengths=LENGTHS if case.data == "padded" else None,
    )
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return _outcome(made, logits.detach(), loss)


def of_a_rank(case: Case, group: Any) -> Outcome:
    s = lr.Sharding(LENGTH, group, case.layout)
    made = model(case.model, "longring", case.dtype)
    if case.checkpointing:
        made.gradient_checkpointing_enable()
    batch = shard_batch(tokens(), s, **given(case))
    with sharded(batch, timeout=TIMEOUT):
        logits = made(**batch.inputs).logits
    loss = cross_entropy(logits, batch.targets, sharding=s, timeout=TIMEOUT)
    return _outcome(made, s.unshard(logits.detach()), loss)  # whose backward is outside of `sharded`


def of_ranks(cases: list[Case]) -> list[Outcome]:
    """What a process of a world does."""
    torch.set_num_threads(1)
    return [of_a_rank(case, dist.group.WORLD) for case in cases]


def _outcome(made: torch.nn.Module, logits: Tensor, loss: Tensor) -> Outcome:
    loss.backward()
    gradients = {name: weight.grad for name, weight in made.named_parameters() if weight.grad is not None}
    return Outcome(logits, loss.item(), gradients)


def check(parts: list[Outcome], want: Outcome, about: object) -> None:
    """Each rank's logits and loss, and the sum of their gradients, in float64."""
    size = float(torch.stack([x.norm() for x in want.gradients.values()]).norm())
    for part in parts:
        _close("logits", part.logits, want.logits, 0.0, about)
        assert abs(part.loss - want.loss) <= 1e-12 * abs(want.loss), (about, part.loss, want.loss)
        assert part.loss == parts[0].loss, about
        assert part.gradients.keys() == want.gradients.keys(), about
    for name, gradient in want.gradients.items():
        # a bias of keys has no gradient at all: what is left is rounding, of the size of other gradients
        _close(name, sum(part.gradients[name] for part in parts), gradient, 1e-14 * size, about)


def _close(name: str, got: Tensor, want: Tensor, extra: float, about: object) -> None:
    error, allowed = float((got - want).norm()), 1e-10 * float(want.norm()) + extra
    assert got.shape == want.shape, (about, name)
    assert error <= allowed, (about, name, error, allowed)
