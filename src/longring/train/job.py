"""The job: a model, its optimiser, and one step of both over all ranks."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from ..errors import ArgumentError, CheckpointError, NotFinite
from ..models import Decoder, DecoderConfig, LongNetConfig, LongNetLM
from ..models.stack import LanguageModel
from ..nn.loss import cross_entropy
from ..plan.quantities import spoken_bytes
from . import states
from .config import Config, branches
from .meter import Meter
from .weights import check_finite, local
from .world import World

if TYPE_CHECKING:
    from .tasks import Sequences

BETAS = (0.9, 0.95)
OPTIMISER_STATES = 2  # AdamW's mean and square of each gradient
IGNORED = -100  # where nothing is to be predicted


class Taken(NamedTuple):
    """One step, as all ranks know it."""

    loss: float  # the mean over all predicted tokens of all sequences of the step
    predicted: int
    learning_rate: float
    gradient_norm: float  # before it was cut down
    attention_seconds: float  # of a rank, on average
    communication_seconds: float
    is_last: bool  # somebody was asked to stop


class Job:
    """Everything that a checkpoint holds, and how it changes in a step.

    taken:  how many sequences of the data the steps so far have used: the next one's number.
    """

    def __init__(self, config: Config, world: World, sequences: Sequences, *, vocabulary: int) -> None:
        self.config, self.world, self.sequences = config, world, sequences
        self.meter = Meter(world.device)
        self.taken = 0
        self.loaded_from: str | None = None  # a checkpoint, until a step has changed its weights
        _check_memory(config, world, vocabulary)
        torch.manual_seed(config.seed)  # the same weights on every rank
        self.model = new_model(config, vocabulary).to(world.device)
        if config.fsdp:
            _deal_parameters(self.model, world)
        self.optimiser = _new_optimiser(self.model, config)

    # ------------------------------------------------------------------------------------------------- one step

    def step(self, number: int, *, is_asked_to_stop: bool) -> Taken:
        """Step `number`, from 1 on."""
        rate = learning_rate(self.config, number)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad(set_to_none=True)
        loss, predicted = self._backward()
        gradients = self._summed_gradients()
        with self.meter.messages():
            told = [loss, predicted, float(is_asked_to_stop), *self.meter.read()]
            loss, predicted, asked, attention, messages = self.world.total(told)
        norm = self._clipped(gradients, max(1.0, predicted))
        if not math.isfinite(norm + loss):
            raise NotFinite(
                f"step {number}: the loss is {loss / max(1.0, predicted):.4g}, the norm of its gradients {norm:.4g}, "
                f"and nothing was saved of it; {self._advice()}"
            )
        self.optimiser.step()
        self.loaded_from = None
        self.taken += cast(int, self.config.batch)
        return Taken(
            loss=loss / max(1.0, predicted),
            predicted=int(predicted),
            learning_rate=rate,
            gradient_norm=norm,
            attention_seconds=attention / self.world.size,
            communication_seconds=messages / self.world.size,
            is_last=asked > 0,
        )

    def _advice(self) -> str:
        if self.loaded_from is None:
            return f"try a lower --learning-rate than {self.config.learning_rate:g}"
        return (
            f"its weights are those of {self.loaded_from}, which no step has changed yet: they are of no use, and no "
            "--learning-rate helps. Go on from an earlier checkpoint"
        )

    def _backward(self) -> tuple[float, float]:
        """Gradients of the sum of this rank's losses, over all of its sequences; (that sum, how many it is of).

        The sum, not a mean: who predicts how many tokens differs from rank to rank and from sequence to sequence,
        and is known when all are done. It is divided then.
        """
        loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        predicted = torch.zeros((), dtype=torch.int64, device=self.world.device)
        starts = self._starts()
        for start in starts:
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(start == starts[-1])
            mine, counted = self._losses(range(start, start + self.config.micro_batch))
            # FSDP2 takes the mean over ranks
            (mine * self.world.size if self.config.fsdp else mine).backward()
            loss += mine.detach()
            predicted += counted
        return loss.item(), float(predicted.item())

    def _starts(self) -> range:
        """The numbers of this ring's sequences that begin a micro-batch."""
        config = self.config
        assert config.batch is not None
        rows = config.batch // config.data_ranks
        first = self.taken + self.world.data_rank * rows
        return range(first, first + rows, config.micro_batch)

    def _losses(self, numbers: range) -> tuple[Tensor, Tensor]:
        """The sum of the losses of this rank's part of these sequences, and how many tokens it predicts."""
        rows = [self.sequences.sequence(number) for number in numbers]
        documents = _documents([row.documents for row in rows])
        s = self.world.sharding(self.config, documents)
        tokens, targets = (
            s.shard(torch.stack(whole)).to(self.world.device, non_blocking=True)
            for whole in ([row.tokens for row in rows], [row.targets for row in rows])
        )
        is_16_bit = self.config.dtype == "bf16"
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=is_16_bit):
            logits = self.model(tokens, sharding=s, documents=documents)
        counted = (targets != IGNORED).sum()
        return cross_entropy(logits, targets) * counted, counted

    def _summed_gradients(self) -> list[Tensor]:
        """Of all ranks; under FSDP2, which has summed them, this rank's part of them."""
        parameters = list(self.model.parameters())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [cast(Tensor, parameter.grad) for parameter in parameters]
        if not self.config.fsdp:
            with self.meter.messages():
                self.world.add_up(gradients)
        return gradients

    def _clipped(self, gradients: list[Tensor], predicted: float) -> float:
        """Divide by how many tokens were predicted, and cut down to the norm that is allowed; the norm before."""
        for gradient in gradients:
            gradient.div_(predicted)
        norm = nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[operator]
        if self.config.clip:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.clip, norm)
        return norm.item()

    # ----------------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, as torch.distributed.checkpoint takes it; whole or dealt alike."""
        return states.collect(self.model, self.optimiser)

    def own_state(self) -> dict[str, Any]:
        """And what of it is this rank's alone."""
        return {"random": states.random_states()}

    def restore(self, state: dict[str, Any], own: dict[str, Any], *, taken: int) -> None:
        """Go on from what both were filled with. The optimiser's settings are not among it: they are the config's."""
        optimiser = {**state["optimiser"], "param_groups": self.state()["optimiser"]["param_groups"]}
        states.restore({**state, "optimiser": optimiser}, self.model, self.optimiser)
        states.set_random_states(own["random"])
        self.taken = taken

    def check(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Refuse what was loaded where no run has saved such a thing: this rank's part, before any of it is used."""
        check_finite(state["model"], "weights")
        for name, moments in state["optimiser"]["state"].items():
            check_finite({f"{part} of {name}": moment for part, moment in moments.items()}, "optimiser's")
            for part in ("exp_avg_sq", "step"):
                if (local(moments[part]) < 0).any():
                    raise CheckpointError(f"its optimiser's {part} of {name} is negative, which no step makes it")
        states.check_random_states(own["random"])


def _documents(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]] | tuple[int, ...] | None:
    """As a pattern takes them: None where every sequence is one, for which plans are simpler."""
    if all(len(row) == 2 for row in rows):
        return None
    return rows if len(rows) > 1 else rows[0]


def learning_rate(config: Config, step: int) -> float:
    """Rising in a line over the steps of the warm-up, then falling as a cosine until the last step."""
    assert config.warmup is not None
    if step < config.warmup:
        return config.learning_rate * step / config.warmup
    done = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    falling = (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * (config.final_rate + (1 - config.final_rate) * falling)


# ---------------------------------------------------------------------------------------------------------- parts


def new_model(config: Config, vocabulary: int, *, device: str | None = None) -> LanguageModel:
    """The model of a settled config, with fresh weights."""
    shape: dict[str, Any] = {"vocab_size": vocabulary, "feedforward_dim": config.feedforward}
    shape |= {name: getattr(config, name) for name in ("dim", "layers", "heads", "kv_heads")}
    if config.dilated is not None:
        lengths, rates = zip(*branches(config.dilated), strict=True)
        shape |= {"segment_lengths": lengths, "dilation_rates": rates}
    made: dict[str, Any] = {
        "checkpoint_activations": config.activation_checkpointing,
        "dtype": torch.float32,  # drawn in it, whatever they become
        "device": device,
        "schedule": config.schedule,
        "kernel": config.kernel,
        "timeout": config.timeout,
    }
    if config.window is not None:
        shape["window"] = (config.window - 1, 0)
    if config.rotary_base is not None:
        shape["base"] = config.rotary_base
    is_longnet = config.model == "longnet"
    model = LongNetLM(LongNetConfig(**shape), **made) if is_longnet else Decoder(DecoderConfig(**shape), **made)
    return model.double() if config.dtype == "fp64" else model


def _check_memory(config: Config, world: World, vocabulary: int) -> None:
    """Refuse what cannot fit, as of a vocabulary that a file of tokens names: the allocator would, or kill the process.

    Counted is only what no run can do without, so that nothing is refused that might fit.
    """
    has = _memory(world.device)
    if has is None:
        return
    assert config.context is not None
    assert config.context_ranks is not None
    weights = sum(weight.nbytes for weight in new_model(config, vocabulary, device="meta").parameters())
    rows = config.micro_batch * (config.context // config.context_ranks)
    logits = rows * vocabulary * (2 if config.dtype == "bf16" else 4)
    needed = max(weights, logits) if config.fsdp else (2 + OPTIMISER_STATES) * weights + logits
    if needed > has:
        raise ArgumentError(
            f"a rank of this run takes at least {spoken_bytes(needed)}, and {world.device} has {spoken_bytes(has)}: "
            f"its model has weights of {spoken_bytes(weights)}, and logits of {vocabulary:,} tokens take "
            f"{spoken_bytes(logits)}. Take a smaller model or vocabulary, a shorter --context or more ranks"
        )


def _memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not everywhere
        return None


def _deal_parameters(model: LanguageModel, world: World) -> None:
    """By FSDP2, layer by layer, over all ranks: those of a ring read the same tokens' weights as all others do."""
    for layer in model.stack.layers:
        fully_shard(layer, mesh=world.everybody)
    fully_shard(model, mesh=world.everybody)


def _new_optimiser(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW; only what multiplies decays, not norms and biases."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ArgumentError("the model has no parameters to train")
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.learning_rate, betas=BETAS)
