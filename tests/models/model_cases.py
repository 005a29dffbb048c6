"""Models, and what ranks make of them: logits, the loss, and the gradient of every parameter."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import longring as lr
from longring.models import Decoder, DecoderConfig, LongNet, LongNetConfig, LongNetLM
from longring.nn import cross_entropy, next_tokens

BATCH, LENGTH, WORDS, DIM = 2, 29, 17, 24  # uneven over 2 and 4 ranks
BOUNDARIES = [[0, 5, 6, 20, LENGTH], [0, 11, LENGTH]]
LENGTHS = [LENGTH, 12]
BRANCHES = {"segment_lengths": (4, 8, 32), "dilation_rates": (1, 2, 4)}
SMALL = {"dim": DIM, "layers": 2, "heads": 4}
ONE_DRAWS = threading.Lock()  # ranks that are threads share the generator


@dataclass(frozen=True)
class Case:
    kind: type[nn.Module]
    config: LongNetConfig | DecoderConfig
    pattern: lr.Dense | lr.Dilated
    layout: str = "zigzag"
    told: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def longnet(**words: Any) -> LongNetConfig:
    return LongNetConfig(**{**SMALL, **BRANCHES, **words})


def decoder(**words: Any) -> DecoderConfig:
    return DecoderConfig(vocab_size=WORDS, **{**SMALL, "kv_heads": 2, **words})


DILATED = lr.Dilated([4, 8, 32], [1, 2, 4])
OPEN = lr.Dilated([4, 8, 32], [1, 2, 4], causal=False)
CASES = {
    "longnet of tokens": Case(LongNet, longnet(vocab_size=WORDS), OPEN, "contiguous"),
    "longnet of embeddings, padded": Case(
        LongNet,
        longnet(sub_layernorm=False, kv_heads=2, positions=None),
        lr.Dilated([4, 8, 32], [1, 2, 4], causal=False, documents=[sorted({0, n, LENGTH}) for n in LENGTHS]),
        told={"lengths": LENGTHS},
    ),
    "longnet, language": Case(
        LongNetLM, longnet(vocab_size=WORDS, positions="xpos", max_length=40, kv_heads=2), DILATED, "contiguous"
    ),
    "longnet, language, again": Case(
        LongNetLM,
        longnet(vocab_size=WORDS, tie_embeddings=False, phase="block"),
        lr.Dilated([4, 8, 32], [1, 2, 4], phase="block", documents=BOUNDARIES),
        told={"documents": BOUNDARIES},
        options={"checkpoint_activations": True},
    ),
    "longnet, language, norms last": Case(
        LongNetLM,
        longnet(
            vocab_size=WORDS,
            positions="xpos",
            max_length=40,
            scale_base=16,
            sub_layernorm=False,
            norm_first=False,
            residual_scale=1.7,
            final_norm=False,
            embedding_scale=3.0,
            embedding_norm=True,
        ),
        DILATED,
    ),
    "decoder": Case(Decoder, decoder(), lr.Dense()),
    "decoder, again": Case(
        Decoder,
        decoder(tie_embeddings=True, window=(9, 0)),
        lr.Dense(window=(9, 0), documents=BOUNDARIES),
        "striped",
        {"documents": BOUNDARIES},
        {"checkpoint_activations": True, "schedule": "ring"},
    ),
    "decoder, dilated": Case(Decoder, decoder(**BRANCHES, base=500.0), DILATED, "contiguous"),
}


class Found(NamedTuple):
    """What one process or rank has of a case."""

    out: Tensor
    loss: Tensor
    parameters: dict[str, Tensor]  # their gradients


def inputs(case: Case) -> tuple[Tensor, Tensor]:
    """(tokens or embeddings, targets or the gradient of the output), whole."""
    draw = torch.Generator().manual_seed(11)
    if isinstance(case.config, LongNetConfig) and case.config.vocab_size is None:
        x = torch.randn(BATCH, LENGTH, DIM, generator=draw, dtype=torch.float64)
    else:
        x = torch.randint(WORDS, (BATCH, LENGTH), generator=draw)
    if case.kind is LongNet:
        return x, torch.randn(BATCH, LENGTH, DIM, generator=draw, dtype=torch.float64)
    return x, next_tokens(x, documents=case.told.get("documents"))


def made(case: Case, **options: Any) -> nn.Module:
    with ONE_DRAWS, torch.no_grad():
        torch.manual_seed(3)
        model = case.kind(case.config, dtype=torch.float64, **{**case.options, **options})
        for parameter in model.parameters():  # norms too: what is 1 hides mistakes
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def found(model: nn.Module, out: Tensor, loss: Tensor) -> Found:
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    return Found(out.detach(), loss.detach(), dict(zip(names, gradients, strict=True)))


def alone(case: Case, **options: Any) -> Found:
    model, (x, target) = made(case, **options), inputs(case)
    out = model(x, **case.told)
    loss = (out * target).sum() if case.kind is LongNet else cross_entropy(out, target)
    return found(model, out, loss)


def on_this_rank(names: list[str], group: Any = None, **options: Any) -> list[Found]:
    torch.set_num_threads(1)
    return [_on_this_rank(CASES[name], group or dist.group.WORLD, options) for name in names]


def _on_this_rank(case: Case, group: Any, options: dict[str, Any]) -> Found:
    model, (x, target) = made(case, **options), inputs(case)
    s = lr.Sharding(LENGTH, group, case.layout)
    out, target = model(s.shard(x), sharding=s, **case.told), s.shard(target)
    loss = (out * target).sum() if case.kind is LongNet else cross_entropy(out, target, sharding=s)
    return found(model, out, loss)
