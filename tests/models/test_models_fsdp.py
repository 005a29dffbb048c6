"""Models that FSDP2 has sharded: drawn on every rank's part, and the losses of one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import longring as lr
from longring.models import Decoder, DecoderConfig, LongNetConfig, LongNetLM
from longring.nn import cross_entropy, next_tokens

pytestmark = pytest.mark.processes

N, WORDS = 37, 50
CONFIGS = (
    DecoderConfig(vocab_size=WORDS, dim=128, layers=2, heads=4, kv_heads=2),
    LongNetConfig(vocab_size=WORDS, dim=128, layers=2, heads=4, segment_lengths=(8, 32), dilation_rates=(1, 2)),
)


def made(config, **words):
    return (Decoder if isinstance(config, DecoderConfig) else LongNetLM)(config, **words)


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.stack.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def drawn_anew():
    """The deviations of weights that went from the meta device through FSDP to their first values."""
    found = []
    for config in CONFIGS:
        torch.manual_seed(dist.get_rank())
        model = sharded(made(config, device="meta")).to_empty(device="cpu")
        model.reset_parameters()
        found.append({name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()})
    return found


def test_initial_values_reach_every_part():
    found = lr.launch(drawn_anew, ranks=2, timeout=100)[0]
    for config, weights in zip(CONFIGS, found, strict=True):
        torch.manual_seed(0)
        usual = dict(made(config).named_parameters())
        assert weights.keys() == usual.keys()
        for name, want in usual.items():
            got = weights[name]
            assert got.shape == want.shape
            if want.std(correction=0) == 0:
                assert torch.equal(got, want), name
            else:
                assert got.std().item() == pytest.approx(want.std().item(), rel=0.1), name
    heads = found[1]["stack.layers.0.attention.in_proj_weight"].split(128)
    gains = (1, 1, math.sqrt(math.log(4)))
    for weight, gain in zip(heads, gains, strict=True):
        assert weight.std().item() == pytest.approx(gain * math.sqrt(2 / 256), rel=0.05)


def trained(model, tokens, sharding=None):
    """Losses of three steps; what is averaged over ranks by FSDP counts every rank's tokens once."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    targets = next_tokens(tokens)
    if sharding is not None:
        tokens, targets = sharding.shard(tokens), sharding.shard(targets)
    for _ in range(3):
        loss = cross_entropy(model(tokens, sharding=sharding), targets, sharding=sharding, gradients="mean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batch():
    return torch.randint(WORDS, (2, N), generator=torch.Generator().manual_seed(4))


def train_over_ranks():
    found = []
    for config in CONFIGS:
        torch.manual_seed(0)
        model = sharded(made(config, dtype=torch.float64, checkpoint_activations=True))
        found.append(trained(model, batch(), lr.Sharding(N, dist.group.WORLD)))
    return found


def test_three_steps_have_the_losses_of_one_process():
    wants = []
    for config in CONFIGS:
        torch.manual_seed(0)
        wants.append(trained(made(config, dtype=torch.float64), batch()))
    for found in lr.launch(train_over_ranks, ranks=2, timeout=100):
        for got, want in zip(found, wants, strict=True):
            assert got == pytest.approx(want, rel=1e-11)
            assert want[2] < want[0]
