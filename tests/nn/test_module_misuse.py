"""What people forget or mistake over ranks: a module says so on every rank, or does what it does without ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import longring as lr
from longring.models import Decoder, DecoderConfig
from longring.nn import Multihead, MultiheadAttention, MultiheadDilatedAttention, RingAttention, Rotary

pytestmark = pytest.mark.processes

E, H, N = 24, 4, 13
LENGTHS = [N, 5]


def drawn():
    return torch.randn(2, N, E, generator=torch.Generator().manual_seed(1))


def module(kind=MultiheadAttention, **words):
    torch.manual_seed(0)
    return kind(E, H, positions=Rotary(6), **words)


def raised(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def forgotten():
    """(rings without a sharding or its group, attention that has no ring in it and so stays on its rank)"""
    ring = raised(module(Multihead, attention=RingAttention()), drawn())
    q = torch.ones(1, 4, 2, 8)
    without_group = raised(RingAttention(), q, q, q, sharding=lr.Sharding(4))
    return ring, raised(RingAttention(), q, q, q), without_group, module()(drawn())[0].detach()


def test_a_forgotten_sharding_is_an_error_in_a_ring():
    wanting = ["neither sharding nor group", "neither sharding nor group", "a sharding that has no group"]
    for *rings, local in lr.launch(forgotten, ranks=2, timeout=60):
        for (kind, text), want in zip(rings, wanting, strict=True):
            assert kind == "ScheduleRefusal"
            assert f"in a world of 2 ranks with {want}" in text
        torch.testing.assert_close(local, module()(drawn())[0].detach())


def one_has_too_many():
    s = lr.Sharding(N, dist.group.WORLD)
    mine = s.shard(drawn())
    mine = torch.cat([mine, mine[:, :1]], 1) if s.rank == 1 else mine
    own = module(causal=True, timeout=30)
    config = DecoderConfig(vocab_size=9, dim=E, layers=1, heads=H)
    model, tokens = Decoder(config, timeout=30), mine[..., 0].long().clamp(0, 8)
    return raised(own, mine, sharding=s), raised(model, tokens, sharding=s)


def test_a_rank_with_too_many_tokens_is_heard_of_by_all():
    found = lr.launch(one_has_too_many, ranks=3, timeout=60)
    for call in range(2):
        for rank, (kind, text) in enumerate(calls[call] for calls in found):
            assert kind == ("LayoutError" if rank == 1 else "Disagreement")
            assert "q holds 5 tokens, but zigzag deals 4 of 13" in text


def masked():
    s = lr.Sharding(N, dist.group.WORLD)
    mask = torch.arange(N) >= torch.tensor(LENGTHS).unsqueeze(1)
    branches = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}
    own, dilated = module(), module(MultiheadDilatedAttention, **branches)
    outs = [s.unshard(each(s.shard(drawn()), sharding=s, key_padding_mask=mask)[0]) for each in (own, dilated)]
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    causal = s.unshard(own(s.shard(drawn()), sharding=s, attn_mask=future, is_causal=True)[0])
    part = raised(own, s.shard(drawn()), sharding=s, key_padding_mask=s.shard(mask))
    wants = [each(drawn(), key_padding_mask=mask)[0] for each in (own, dilated)]
    wants.append(own(drawn(), is_causal=True)[0])
    return [(got - want).abs().max().item() for got, want in zip([*outs, causal], wants, strict=True)], part


def test_masks_are_of_the_whole_sequence():
    for errors, (kind, text) in lr.launch(masked, ranks=2, timeout=60):
        assert max(errors) < 1e-5
        assert kind == "ArgumentError"
        assert "key_padding_mask must be [2, 13], one row for all keys of the sequence whoever holds them" in text


def averaged_by_ddp():
    """A batch row on each rank, attention within it: what DDP is for."""
    own = torch.nn.parallel.DistributedDataParallel(module())
    own(drawn()[dist.get_rank()].unsqueeze(0))[0].square().sum().backward()
    return {name: parameter.grad for name, parameter in own.module.named_parameters()}


def test_inside_ddp_attention_stays_on_its_rank():
    own = module()
    own(drawn())[0].square().sum().backward()
    for gradients in lr.launch(averaged_by_ddp, ranks=2, timeout=60):
        for name, parameter in own.named_parameters():
            torch.testing.assert_close(gradients[name] * 2, parameter.grad)


def one_has_a_mask_that_cannot_be():
    s = lr.Sharding(N, dist.group.WORLD)
    padding = torch.zeros(2, N, dtype=torch.bool)
    padding[0, 3] = s.rank == 1  # a hole
    return raised(module(timeout=30), s.shard(drawn()), key_padding_mask=padding, sharding=s)


def test_what_one_rank_refuses_before_attention_is_heard_of_by_all():
    (kind, heard), (refusal, said) = lr.launch(one_has_a_mask_that_cannot_be, ranks=2, timeout=60)
    assert (refusal, said[:16]) == ("NotBuilt", "key_padding_mask")
    assert kind == "Disagreement"
    assert "an argument was refused (key_padding_mask must have its padding on the right" in heard
