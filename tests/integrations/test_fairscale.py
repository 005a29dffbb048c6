"""FairScale over rings: the losses, and the weights, of one process.

Its FullyShardedDataParallel takes CUDA's streams without asking whether there are any; here nothing stands in for
them, which leaves its arithmetic and its messages as they are.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
from training_runs import Place, Run, check, made, optimiser_of, trained, whole_parameters

import longring as lr

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("fairscale") is None, reason="fairscale is not installed"),
]


class NoStream:
    def wait_stream(self, other):
        pass


def without_streams():
    """In this process alone, which ends with the run."""
    from fairscale.nn.data_parallel import fully_sharded_data_parallel as fairscale

    nowhere = NoStream()
    torch.cuda.current_stream = lambda *_: nowhere
    torch.cuda.synchronize = lambda: None
    torch.cuda.stream = lambda _: nullcontext()
    torch.Tensor.record_stream = lambda *_: None
    set_up = fairscale.FullyShardedDataParallel._setup_streams

    def with_nothing(self):
        set_up(self)
        self._streams.update(dict.fromkeys(("all_gather", "post_backward", "fp32_to_fp16"), nowhere))

    fairscale.FullyShardedDataParallel._setup_streams = with_nothing
    return fairscale.FullyShardedDataParallel


def fully_sharded(place, **words):
    wrap = without_streams()
    # without buckets, whose reduce-scatter Gloo refuses for the shape of its tensors
    words |= {"compute_device": torch.device("cpu"), "bucket_cap_mb": 0}
    model = made(torch.float32)
    for index, layer in enumerate(model.stack.layers):
        model.stack.layers[index] = wrap(layer, **words)
    model = wrap(model, **words)
    losses = trained(place, model, optimiser_of(model))
    with model.summon_full_params():
        return Run(losses, whole_parameters(model))


def sharded_optimiser(place):
    from fairscale.nn import ShardedDataParallel
    from fairscale.optim import OSS

    model = made(torch.float64)
    optimiser = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.5, momentum=0.9)
    model = ShardedDataParallel(model, optimiser)
    optimiser.zero_grad = model.zero_grad  # the optimiser's own forgets what lies in the model's buckets
    return Run(trained(place, model, optimiser), whole_parameters(model))


def every_run():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    place = Place.on_a_mesh()
    return sharded_optimiser(place), fully_sharded(place), fully_sharded(place, reshard_after_forward=False)


def test_every_rank_has_the_run_of_one_process():
    for optimiser, *runs in lr.launch(every_run, ranks=4, timeout=110):
        check(optimiser, torch.float64)
        for run in runs:
            check(run, torch.float32)
