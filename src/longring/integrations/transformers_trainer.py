"""Hugging Face Trainer over ranks: a mixin that shards every sequence, in `train`, `evaluate` and `predict`.

The Trainer takes all processes for data parallel: it gives each of them other examples, and gathers the results of all.
Here consecutive processes form a context parallel group: they read the same examples, each holds its shard of every
sequence, and the results of a group are gathered once. Neither this module nor importing it loads the Trainer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, NotBuilt
from ..nn.loss import cross_entropy, next_tokens
from ..sharding import Sharding
from .transformers import Batch, shard_batch, sharded

if TYPE_CHECKING:  # as a mixin it needs no base class of its own, and works with every subclass of the Trainer
    from transformers import Trainer
else:
    Trainer = object

IGNORED = -100  # the label that the losses of transformers leave out
UNDERSTOOD = ("input_ids", "labels", "attention_mask", "position_ids")
SHIFTED = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False, "ForTokenClassification": False}


class Ranks(NamedTuple):
    """This process in a mesh of data parallel times context parallel processes."""

    context: Any  # the group whose processes hold one sequence
    data: Any  # the group of those that hold the same shards of other sequences; None where there is only one
    data_size: int
    data_rank: int
    context_size: int


class ContextParallelMixin(Trainer):
    """Makes a Trainer shard every sequence over processes: `class LongTrainer(ContextParallelMixin, Trainer): pass`.

    The model must attend by longring (`attn_implementation="longring"`). On p processes, with every sequence sharded
    over c of them, the results are those of the Trainer itself on p / c processes: losses, metrics and predictions.

    context_parallel_size:  c, which must divide the number of processes; None is all of them.
    layout:                 how tokens are assigned to the processes of a group, as for `longring.Sharding`.
    attention_options:      schedule, kernel, deterministic and timeout, as for `sharded`.
    """

    context_parallel_size: int | None = None
    layout: str = "zigzag"
    attention_options: Mapping[str, Any] = {}

    # ------------------------------------------------------------------------------------- which process reads what

    def create_accelerator_and_postprocess(self) -> None:
        """The accelerator of the Trainer, with data loaders and gathering over the data parallel processes only."""
        super().create_accelerator_and_postprocess()
        self._check_arguments()
        self.context_ranks = self._ranks()
        if self.context_ranks.context_size > 1:
            self._refuse_what_is_left_out()
            accelerator: Any = self.accelerator
            accelerator.prepare_data_loader = self._prepare_data_loader
            accelerator.gather = self._gather  # which gather_for_metrics calls, and then drops duplicates

    def _check_arguments(self) -> None:
        args = self.args
        if args.n_gpu > 1:
            raise ArgumentError(
                f"this process would use {args.n_gpu} GPUs by DataParallel, which longring does not support; start one "
                "process per GPU, for example by torchrun"
            )
        if self.accelerator.dispatch_batches or args.eval_use_gather_object:
            name = "dispatch_batches" if self.accelerator.dispatch_batches else "eval_use_gather_object"
            raise NotBuilt(f"{name}=True is not built for the Trainer over ranks: every process reads its own batches")

    def _refuse_what_is_left_out(self) -> None:
        """A Trainer behind the mixin may compute its own loss, which the mixin's would replace without a word."""
        if self.args.neftune_noise_alpha is not None:
            raise NotBuilt("neftune_noise_alpha is not built: its noise depends on the length of the whole sequence")
        kinds = type(self).__mro__
        for kind in kinds[kinds.index(ContextParallelMixin) + 1 :]:
            for name in ("compute_loss", "prediction_step"):
                if name in vars(kind) and kind.__module__ != "transformers.trainer":
                    raise NotBuilt(
                        f"{kind.__name__}.{name} would never be called, since the Trainer over ranks computes the loss "
                        f"itself; override {name} in a class in front of ContextParallelMixin"
                    )

    def _ranks(self) -> Ranks:
        size, rank = self.accelerator.num_processes, self.accelerator.process_index
        context_size = size if self.context_parallel_size is None else self.context_parallel_size
        if type(context_size) is not int or context_size < 1 or size % context_size:
            raise ArgumentError(f"context_parallel_size must divide the {size} processes, got {context_size!r}")
        if context_size == size:
            return Ranks(dist.group.WORLD if size > 1 else None, None, 1, 0, size)
        shape = (size // context_size, context_size)
        mesh = dist.init_device_mesh(self.accelerator.device.type, shape, mesh_dim_names=("data", "context"))
        return Ranks(mesh.get_group("context"), mesh.get_group("data"), shape[0], rank // context_size, context_size)

    def _prepare_data_loader(self, loader: Any, device_placement: bool | None = None, **how: Any) -> Any:
        """As Accelerator.prepare_data_loader, but the processes of a context parallel group read the same batches."""
        from accelerate.data_loader import prepare_data_loader

        ranks = self.context_ranks
        a: Any = self.accelerator
        seed = loader.worker_init_fn
        if isinstance(seed, partial) and "rank" in seed.keywords:  # the Trainer's: workers of a group draw the same
            loader.worker_init_fn = partial(seed, rank=ranks.data_rank)
        prepared = prepare_data_loader(
            loader,
            a.device,
            num_processes=ranks.data_size,
            process_index=ranks.data_rank,
            split_batches=a.split_batches,
            put_on_device=a.device_placement if device_placement is None else device_placement,
            # Samplers draw from torch's own generator too, as `group_by_length` does. On CPUs dropout does so as well,
            # and ranks that hold shards of different lengths would then read other examples from the second epoch on.
            rng_types=[*a.rng_types, *({"torch"} - {str(getattr(x, "value", x)) for x in a.rng_types})],
            dispatch_batches=False,
            even_batches=a.even_batches,
            use_seedable_sampler=a.use_seedable_sampler,
            data_seed=a.dataloader_config.data_seed,
            non_blocking=a.non_blocking,
            use_stateful_dataloader=a.use_stateful_dataloader,
        )
        a._dataloaders.append(prepared)
        return prepared

    def _gather(self, tensors: Any) -> Any:
        """The tensors of all data parallel processes, one behind the other; a context parallel group counts once."""
        from accelerate.utils import recursively_apply

        ranks = self.context_ranks
        if ranks.data is None:
            return tensors

        def gathered(x: Tensor) -> Tensor:
            rows = torch.atleast_1d(x).contiguous()
            parts = [torch.empty_like(rows) for _ in range(ranks.data_size)]
            dist.all_gather(parts, rows, group=ranks.data)
            return torch.cat(parts)

        return recursively_apply(gathered, tensors, error_on_other_type=True)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Examples of one optimizer step."""
        return super().get_total_train_batch_size(args) // self.context_ranks.context_size

    # ------------------------------------------------------------------------------------------- what is computed

    def shard_inputs(self, inputs: Mapping[str, Any]) -> Batch:
        """This process's shard of a batch, without targets; to be overridden for inputs of other names."""
        unknown = sorted(name for name, x in inputs.items() if x is not None and name not in UNDERSTOOD)
        if unknown or inputs.get("input_ids") is None:
            got = f"got {', '.join(unknown)}" if unknown else "got no input_ids"
            raise NotBuilt(f"the Trainer over ranks shards {', '.join(UNDERSTOOD)}; {got}; override shard_inputs")
        ids = inputs["input_ids"]
        sharding = Sharding(ids.shape[-1], self.context_ranks.context, self.layout)
        return shard_batch(
            ids,
            sharding,
            labels=inputs.get("labels"),
            attention_mask=inputs.get("attention_mask"),
            documents=_documents(inputs.get("position_ids")),
            timeout=self.attention_options.get("timeout"),
        )

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of the whole sequences, the same on every process of a group; outputs are those of its shard."""
        if self.context_ranks.context_size == 1:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if inputs.get("labels") is None:
            raise ArgumentError("a batch without labels has no loss; let the data collator make labels")
        batch, outputs = self._outputs(model, inputs)
        loss = self._loss(batch, _logits(outputs), inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss, logits of the whole sequences and labels; other outputs of the model are not gathered."""
        if self.context_ranks.context_size == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        labels, loss = inputs.get("labels"), None
        with self.compute_loss_context_manager():
            batch, outputs = self._outputs(model, inputs)
            if labels is not None:
                items = self._get_num_items_in_batch([inputs], self.args.device)
                loss = self._loss(batch, _logits(outputs), labels, items)
        if prediction_loss_only:
            return loss, None, None
        whole = batch.sharding.unshard(_logits(outputs), timeout=self.attention_options.get("timeout"))
        return loss, whole, labels

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """As the Trainer's own. A model evaluated before `train` must still be wrapped in DDP by it.

        Accelerate marks a model that it prepared for evaluation, and takes it for wrapped when training begins:
        gradients would then never be averaged.
        """
        found = super().evaluation_loop(*args, **options)
        if not (self.is_in_train or self.is_fsdp_enabled or self.is_deepspeed_enabled):
            model: Any = self.model
            model._is_accelerate_prepared = False
        return found

    def _outputs(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Batch, Any]:
        batch = self.shard_inputs(inputs)
        with sharded(batch, **self.attention_options):
            return batch, model(**batch.inputs)

    def _loss(self, batch: Batch, logits: Tensor, labels: Tensor, items: Tensor | int | None) -> Tensor:
        """The sum over this group's tokens, divided by the items of all batches of the step, as the models' own."""
        targets = next_tokens(labels, ignore_index=IGNORED) if self._shifts_labels() else labels
        mean = cross_entropy(
            logits,
            batch.sharding.shard(targets),
            sharding=batch.sharding,
            ignore_index=IGNORED,
            gradients="mean",  # the mean over all processes is taken by DDP, FSDP or DeepSpeed
            timeout=self.attention_options.get("timeout"),
        )
        if items is None:
            return mean
        groups = self.context_ranks.data_size if self.args.average_tokens_across_devices else 1
        return mean * (targets.ne(IGNORED).sum() * groups / items)

    def _shifts_labels(self) -> bool:
        """Whether the model's loss compares a token's logits with the next label; losses of other kinds are refused."""
        if self.compute_loss_func is not None or self.label_smoother is not None:
            name = "label_smoothing_factor" if self.compute_loss_func is None else "compute_loss_func"
            raise NotBuilt(f"{name} is not built for the Trainer over ranks, which computes the cross-entropy itself")
        model: Any = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
        if getattr(model.config, "output_router_logits", False):
            raise NotBuilt("output_router_logits=True adds a loss of the router, which is not built over ranks")
        name = getattr(model.loss_function, "__name__", repr(model.loss_function))
        if name not in SHIFTED:
            raise NotBuilt(
                f"{type(model).__name__} computes its loss by {name}; over ranks {', '.join(SHIFTED)} are built"
            )
        kind = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
        if not kind.__module__.startswith("transformers."):
            warnings.warn(
                f"{kind.__name__} has a forward of its own: what that adds to the loss is left out over ranks, where "
                f"the loss is the cross-entropy of {name}; override compute_loss for another",
                stacklevel=2,
            )
        return SHIFTED[name]


def _logits(outputs: Any) -> Tensor:
    return outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]


def _documents(position_ids: Tensor | None) -> list[list[int]] | None:
    """The boundaries of packed documents, in each of which position ids count up from 0."""
    if position_ids is None:
        return None
    if position_ids.ndim != 2 or (position_ids[:, :1] != 0).any():
        raise NotBuilt(f"position_ids must be [batch, n] and begin at 0, got shape {list(position_ids.shape)}")
    steps = position_ids.diff(dim=1)
    if ((steps != 1) & (position_ids[:, 1:] != 0)).any():
        raise NotBuilt("position_ids must count up by one, or restart at 0 where a packed document begins")
    n = position_ids.shape[1]
    return [[0, *(row.nonzero().flatten() + 1).tolist(), n] for row in steps != 1]
