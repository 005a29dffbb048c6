"""torch.compile around attention over real ranks: the operation carries the messages, in the same order everywhere."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import longring as lr
from longring.call import Options
from longring.compiled import OVER_RANKS, spelled_out
from longring.nn import DilatedAttention

pytestmark = pytest.mark.processes
N = 21


def attend(q, k, v, **options):
    return lr.attention(2 * q, k, v, return_lse=True, timeout=30, **options)


def packed(q, k, v, **options):
    return lr.ring_attention(2 * q, k, v, return_lse=True, timeout=30, **options)


def mine(s):
    draw = torch.Generator().manual_seed(0)
    return [s.shard(torch.randn(2, N, heads, 8, generator=draw)).requires_grad_() for heads in (4, 2, 2)]


def results(call, leaves):
    found = call(*leaves)
    seeds = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in found]
    return [x.detach() for x in found] + list(torch.autograd.grad(found, leaves, seeds))


# ------------------------------------------------------------------------------------------- the same as in eager


def cases():
    """(sharding, further options) by what is tried."""
    world = dist.group.WORLD
    zigzag, contiguous = lr.Sharding(N, world), lr.Sharding(N, world, "contiguous", align=4)
    ranges = lr.Sharding.from_ranges([[range(5), range(9, N)], [range(5, 9)]], group=world)
    documents = [0, 4, 15, N]
    dealt = lr.Sharding(N, world, "dealt", documents=documents)
    return {
        "as it comes": (zigzag, {}),
        "a ring": (zigzag, {"schedule": "ring", "scale": 0.2}),
        "by heads": (zigzag, {"schedule": "ulysses"}),
        "ranges": (ranges, {"kv_sharding": ranges, "schedule": "gather"}),
        "a mesh": (lr.Sharding(N, dist.init_device_mesh("cpu", (1, 2)), "striped"), {"schedule": "double_ring"}),
        "documents": (dealt, {"pattern": lr.Dense(documents=documents)}),
        "a table": (dealt, {"documents": torch.tensor(documents)}),
        "dilated": (contiguous, {"pattern": lr.Dilated([4, 16], [1, 2]), "schedule": "exchange"}),
    }


def differing():
    """What is not, bit for bit, as in eager."""
    warnings.simplefilter("ignore")  # of the compiler
    found = []
    for name, (s, options) in cases().items():
        torch._dynamo.reset()
        call = partial(packed if "documents" in options else attend, sharding=s, **options)
        got = results(torch.compile(call, backend="aot_eager", fullgraph=True), mine(s))
        found += [name for a, b in zip(got, results(call, mine(s)), strict=True) if not a.equal(b)]
    return found


def test_the_same_bits_as_in_eager():
    assert lr.launch(differing, ranks=2, timeout=110) == [[], []]


# ---------------------------------------------------------------------------------------------- the order of calls


class Layers(torch.nn.Module):
    """Two layers, and attention whose result only rank 0 looks at."""

    def __init__(self, s, is_checkpointed):
        super().__init__()
        torch.manual_seed(0)
        self.s, self.is_checkpointed = s, is_checkpointed
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in range(2))

    def layer(self, x, index):
        q, k, v = self.qkv[index](x).unflatten(2, (6, 8)).split([2, 2, 2], dim=2)
        return x + lr.attention(q, k, v, sharding=self.s, timeout=30).flatten(2)

    def forward(self, x):
        for index in range(2):
            x = checkpoint(self.layer, x, index, use_reentrant=False) if self.is_checkpointed else self.layer(x, index)
        heads = x.unflatten(2, (2, 8)).detach()
        ignored = lr.attention(heads, heads, heads, sharding=self.s, timeout=30)
        return x if self.s.rank == 1 else x + 0 * ignored.flatten(2)


def trained(backend, is_checkpointed):
    """Two steps, compiled and in eager: how many calls this rank took part in."""
    s = lr.Sharding(N, dist.group.WORLD)
    model = Layers(s, is_checkpointed)
    x = s.shard(torch.randn(1, N, 16, generator=torch.Generator().manual_seed(1))).requires_grad_()
    found = []
    for run in (torch.compile(model, backend=backend, fullgraph=not is_checkpointed), model):
        for _ in range(2):
            loss = run(x).square().sum()
            gradients = torch.autograd.grad(loss, [x, *model.parameters()])
        found.append([loss.detach(), *gradients])
    torch.testing.assert_close(*found)
    return s.transport._conversations


def another_group():
    """One compiled function and two groups of the same ranks: how many calls each of them saw, from call to call."""
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    both = [lr.Sharding(N, group) for group in groups]
    call = torch.compile(lambda q, k, v, s: attend(q, k, v, sharding=s), backend="aot_eager", fullgraph=True)
    seen = []
    for s in (*both, *both):
        call(*(x.detach() for x in mine(s)), s)
        seen.append([one.transport._conversations for one in both])
    return [[b - a for a, b in zip(one, two, strict=True)] for one, two in pairwise(seen)]


def refusal(wrong):
    """What this rank hears when rank 1 makes a mistake in compiled code, which the group does not survive."""
    s = lr.Sharding(N, dist.new_group([0, 1]))
    q, k, v = (x.detach() for x in mine(s))
    options = {}
    if s.rank == 1:
        q = {"batch": q[0], "heads": q[:, :, :3]}.get(wrong, q)
        options = {"scale": "much"} if wrong == "scale" else {}
    try:
        torch.compile(partial(attend, sharding=s, **options), backend="aot_eager", fullgraph=wrong != "batch")(q, k, v)
    except Exception as error:
        return type(error).__name__, str(error)


def checked():
    """What PyTorch says of the operations, and their backward, when every rank asks."""
    s = lr.Sharding(N, dist.group.WORLD)
    call = spelled_out(lr.Dense(), Options(sharding=s, timeout=30.0))
    q, k, v = mine(s)
    out, lse = OVER_RANKS.forward(q.detach(), k.detach(), v.detach(), *call)
    back = (torch.ones_like(out), None, out, lse, q.detach(), k.detach(), v.detach(), *call)
    found = opcheck(OVER_RANKS.forward, (q, k, v, *call)), opcheck(OVER_RANKS.backward, back)
    return {said for one in found for said in one.values()}


def one_after_the_other():
    warnings.simplefilter("ignore")
    found = {"layers": trained("aot_eager_decomp_partition", False), "checkpointed": trained("aot_eager", True)}
    torch._dynamo.reset()
    found |= {"groups": another_group(), "promises": checked()}
    return found | {wrong: refusal(wrong) for wrong in ("scale", "heads", "batch")}


def test_every_rank_makes_the_same_calls():
    one, other = lr.launch(one_after_the_other, ranks=2, timeout=110)
    for name in ("layers", "checkpointed", "groups", "promises"):
        assert one[name] == other[name]
    assert one["promises"] == {"SUCCESS"}
    assert one["groups"] == [[0, 1], [1, 0], [0, 1]]
    words = {
        "scale": "rank 1: scale must be a finite number, got 'much'",
        "heads": "rank 1: heads must be a multiple of kv_heads, got 3 and 2",
        "batch": "rank 1: q must be [batch, n, heads, d]",
    }
    for wrong, text in words.items():
        assert other[wrong][0] == "ArgumentError"
        assert one[wrong][0] == "Disagreement"
        assert text in other[wrong][1]
        assert text in one[wrong][1]


def in_one_world_after_another(file):
    """(whether a compiled module is as in eager, the name of its group) in a world, and in the next of that name."""
    warnings.simplefilter("ignore")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = [with_padding()]
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    return [*found, with_padding()]


def with_padding():
    torch._dynamo.reset()
    s = lr.Sharding(N, dist.group.WORLD, "contiguous")
    module = DilatedAttention(segment_lengths=[4, 16], dilation_rates=[1, 2], timeout=30)
    call = partial(module, sharding=s, lengths=torch.tensor([N, 9]))
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    return compiled(*mine(s)).equal(call(*mine(s))), s.transport.group_name


def test_a_group_that_has_the_name_of_one_that_ended(tmp_path):
    for (same, name), (same_again, name_again) in lr.launch(
        in_one_world_after_another, str(tmp_path / "store"), ranks=2, timeout=110
    ):
        assert same
        assert same_again
        assert name == name_again


def as_users_compile_it():
    warnings.simplefilter("ignore")
    return trained("inductor", False)


@pytest.mark.slow
def test_layers_as_users_compile_them():
    one, other = lr.launch(as_users_compile_it, ranks=2, timeout=110)
    assert one == other
