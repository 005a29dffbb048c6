"""torch.compile, torch.export and torch.func around attention on one process: no graph break, the same bits."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import longring as lr
import longring.nn
from attending import tensors
from longring.testing import run_ranks

pytestmark = [  # what the compiler says to its authors
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

PATTERNS = {
    "causal": lr.Dense(),
    "full": lr.Dense(causal=False),
    "window": lr.Dense(window=(3, 0)),
    "window on both sides": lr.Dense(causal=False, window=(3, 2)),
    "documents": lr.Dense(documents=[0, 2, 9, 13]),
    "documents by row": lr.Dense(documents=[[0, 2, 13], [0, 13]]),
    "lengths": lr.Dense(lengths=[13, 5]),
    "dilated": lr.Dilated([4, 8, 32], [1, 2, 4]),
    "dilated documents": lr.Dilated([3, 13], [1, 2], causal=False, phase="block", documents=[0, 5, 13]),
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(n_q=13, n_k=None, dtype=torch.float32, kv_heads=2):
    return tensors(2, n_q, n_q if n_k is None else n_k, 4, kv_heads, 8, dtype)[:3]


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def results(function, leaves):
    """What the function gives, and the gradients of all of it."""
    found = function(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    seeds = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in found]
    return *(x.detach() for x in found), *torch.autograd.grad(found, leaves, seeds, allow_unused=True)


def assert_same_bits(got, want):
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or (mine.dtype == theirs.dtype and mine.equal(theirs))


# ------------------------------------------------------------------------------------------- every kind of call


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_every_pattern(pattern):
    call = partial(lr.attention, pattern=pattern, return_lse=True)
    assert_same_bits(results(compiled(call), inputs()), results(call, inputs()))


CALLS = {
    "ring": lambda q, k, v: lr.ring_attention(q, k, v),
    "ring with documents": lambda q, k, v: lr.ring_attention(q, k, v, documents=[0, 4, 13], window=(2, None)),
    "dilated": lambda q, k, v: lr.dilated_attention(q, k, v, segment_lengths=[4, 8], dilation_rates=[1, 2]),
    "a pattern made inside": lambda q, k, v: lr.attention(q, k, v, pattern=lr.Dense(causal=False, lengths=[4, 13])),
    "detached weights": lambda q, k, v: lr.dilated_attention(
        q, k, v, segment_lengths=[4, 8], dilation_rates=[1, 2], mixing_gradient=False
    ),
    "as released": lambda q, k, v: lr.dilated_attention(
        q, q, q, segment_lengths=[4, 8], dilation_rates=[1, 2], causal=False, compat="torchscale"
    ),
    "lse alone": lambda q, k, v: lr.attention(q, k, v, return_lse=True)[1],
    "an offset": lambda q, k, v: lr.attention(q[:, :5], k, v, query_offset=3),
    "a cached prefix": lambda q, k, v: lr.attention(q[:, :5], k, v),
    "a scale": lambda q, k, v: lr.attention(q, k, v, scale=0.25),
    "a kernel": lambda q, k, v: lr.attention(q, k, v, kernel="reference", deterministic=True),
    "a schedule": lambda q, k, v: lr.attention(q, k, v, schedule="gather", timeout=3),
    "one tensor thrice": lambda q, k, v: lr.attention(k, k, k),
    "twice": lambda q, k, v: lr.attention(lr.attention(q, k, v), k, v),
    "packed": lambda q, k, v: lr.attention(*torch.stack((q, q, q), 2).unbind(2)),
    "strided rows": lambda q, k, v: lr.attention(q[:, ::2], k[:, 1::3], v[:, 1::3]),
    "heads first": lambda q, k, v: lr.attention(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))),
    "strided numbers": lambda q, k, v: lr.attention(q[..., ::2], k[..., ::2], v[..., 1::2]),
    "expanded keys": lambda q, k, v: lr.attention(q, *(x[:, :, :1].expand(-1, -1, 4, -1) for x in (k, v))),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call(call):
    assert_same_bits(results(compiled(call), inputs()), results(call, inputs()))


def test_sharding_of_one_rank():
    s = lr.Sharding(13)

    def call(q, k, v):
        return lr.attention(q, k, v, sharding=s, kv_sharding=s)

    assert_same_bits(results(compiled(call), inputs()), results(call, inputs()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_dtype(dtype):
    call = partial(lr.attention, return_lse=True)
    assert_same_bits(results(compiled(call), inputs(dtype=dtype)), results(call, inputs(dtype=dtype)))


def test_only_one_gradient_is_wanted():
    q, k, v = inputs()

    def call(k):
        return lr.attention(q.detach(), k, v.detach())

    assert_same_bits(results(compiled(call), [k]), results(call, [k]))


def test_without_gradients():
    q, k, v = inputs()
    with torch.no_grad():
        assert compiled(lr.attention)(q, k, v).equal(lr.attention(q, k, v))
    with torch.inference_mode():
        assert compiled(lr.attention)(q, k, v).equal(lr.attention(q, k, v))


# ------------------------------------------------------------------------------------- what is written in place


def writes_into_out(q, k, v):
    out, lse = lr.attention(q, k, v, return_lse=True)
    out.mul_(2).relu_()
    return out, lse


def copies_out(q, k, v):
    out, lse = lr.attention(q, k, v, return_lse=True)
    return (out * 2).relu(), lse


def writes_into_inputs(q, k, v):
    q, k, v = q * 1, k * 1, v * 1
    kept = lr.attention(q, k, v) + q
    q.add_(1)
    return kept, lr.attention(q, k, v)


def copies_inputs(q, k, v):
    return lr.attention(q, k, v) + q, lr.attention(q + 1, k, v)


@pytest.mark.parametrize(("writes", "copies"), [(writes_into_out, copies_out), (writes_into_inputs, copies_inputs)])
def test_tensors_that_are_written_into_afterwards(writes, copies):
    with torch.no_grad():
        assert_same_bits(compiled(writes)(*inputs()), copies(*inputs()))
    for call in (writes, compiled(writes)):  # the backward needs what was there before
        with pytest.raises(Exception, match="modified by an inplace operation"):
            results(call, inputs())


def test_an_argument_that_is_written_into():
    def call(cache, q, k, v):
        cache[:, 4:7] = k[:, :3]
        return lr.attention(q[:, :3], cache, cache, query_offset=4)

    q, k, v = (x.detach() for x in inputs())
    mine, theirs = torch.zeros_like(k), torch.zeros_like(k)
    assert compiled(call)(mine, q, k, v).equal(call(theirs, q, k, v))
    assert mine.equal(theirs)


# --------------------------------------------------------------------------------------------- lengths that vary


def test_one_graph_serves_every_length():
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(lambda q, k, v: lr.attention(q, k, v, return_lse=True), counter, dynamic=True)
    for n in (13, 40, 7, 64):
        assert_same_bits(results(call, inputs(n)), results(partial(lr.attention, return_lse=True), inputs(n)))
    assert counter.frame_count == 1


def test_one_graph_serves_every_number_of_a_pattern():
    def call(q, k, v, left, offset):
        return lr.ring_attention(q, k, v, window=(left, 0), documents=[0, left, q.shape[1]], query_offset=offset)

    counter = CompileCounterWithBackend("aot_eager")
    once = compiled(call, counter, dynamic=True)
    for n, left, offset in [(13, 3, 2), (14, 5, 3), (40, 11, 4), (30, 7, 6)]:
        numbers = {"left": left, "offset": offset}
        assert_same_bits(results(partial(once, **numbers), inputs(n)), results(partial(call, **numbers), inputs(n)))
    assert counter.frame_count == 1


def test_lengths_and_segments_that_follow_the_sequence():
    def call(q, k, v):
        n = q.shape[1]
        return lr.dilated_attention(q, k, v, segment_lengths=[n // 2, n], dilation_rates=[1, 2], scale=1 / n)

    counter = CompileCounterWithBackend("aot_eager")
    once = compiled(call, counter, dynamic=True)
    for n in (12, 34, 64):
        assert_same_bits(results(once, inputs(n)), results(call, inputs(n)))


DILATED = longring.nn.DilatedAttention(segment_lengths=[3, 8], dilation_rates=[1, 2])
RING = longring.nn.RingAttention()
TABLES = {
    "ring": lambda q, k, v, documents: lr.ring_attention(q, k, v, documents=documents),
    "dilated": lambda q, k, v, documents: lr.dilated_attention(
        q, k, v, segment_lengths=[3, 8], dilation_rates=[1, 2], documents=documents
    ),
    "a module": lambda q, k, v, documents: RING(q, k, v, documents=documents, lengths=documents[-2:]),
    "a dilated module": lambda q, k, v, documents: DILATED(q, k, v, documents=documents),
    "a dilated module, lengths": lambda q, k, v, documents: DILATED(q, k, v, lengths=documents[-2:] // 2),
    "a dilated module, both": lambda q, k, v, documents: DILATED(q, k, v, documents=documents, lengths=documents[-2:]),
    "lengths": lambda q, k, v, documents: lr.ring_attention(q, k, v, documents=documents, lengths=documents[-2:] // 2),
}


@pytest.mark.parametrize("call", TABLES.values(), ids=TABLES)
def test_one_graph_serves_any_number_of_documents(call):
    counter = CompileCounterWithBackend("aot_eager")
    once = compiled(call, counter, dynamic=True)
    for boundaries in ([0, 4, 13], [0, 2, 5, 9, 13], [0, 1, 2, 3, 4, 5, 13]):
        table = {"documents": torch.tensor(boundaries)}
        assert_same_bits(results(partial(once, **table), inputs()), results(partial(call, **table), inputs()))
    assert counter.frame_count == 1


def test_two_graphs_serve_any_lengths_of_rows():
    """The compiler takes the first numbers for constants; 0 and 1 it knows from others."""
    counter = CompileCounterWithBackend("aot_eager")
    once = compiled(DILATED, counter)
    for lengths in ([13, 5], [7, 13], [2, 3], [13, 13], [12, 11], [4, 9]):
        told = {"lengths": lengths}
        assert_same_bits(results(partial(once, **told), inputs()), results(partial(DILATED, **told), inputs()))
    assert counter.frame_count == 2


def test_one_graph_serves_every_length_of_torchscale():
    """Whose padding depends on what divides the length."""
    call = longring.nn.DilatedAttention(
        segment_lengths=[4, 8, 32], dilation_rates=[1, 2, 4], causal=False, compat="torchscale"
    )
    counter, counts = CompileCounterWithBackend("aot_eager"), set()
    once = compiled(call, counter, dynamic=True)
    for n in (13, 8, 12, 16, 7, 32, 64, 40):
        got, want = results(once, inputs(n, kv_heads=4)), results(call, inputs(n, kv_heads=4))
        assert got[0].equal(want[0])
        torch.testing.assert_close(got, want)  # through a factor that is 1
        counts.add(counter.frame_count)
    assert len(counts) == 1


def test_torchscale_exported():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            words = {"segment_lengths": [4, 8, 32], "dilation_rates": [1, 2, 4], "causal": False}
            return lr.dilated_attention(q, k, v, **words, compat="torchscale")

    n = torch.export.Dim("n", min=2, max=1000)
    dims = {name: {1: n} for name in "qkv"}
    program = torch.export.export(Attention(), tuple(inputs(13, kv_heads=4)), dynamic_shapes=dims)
    for n in (13, 8, 64):
        assert program.module()(*inputs(n, kv_heads=4)).equal(Attention()(*inputs(n, kv_heads=4)))


@pytest.mark.parametrize("name", ["ring", "a dilated module, both"])
def test_tables_of_numbers_that_are_wrong(name):
    call = compiled(TABLES[name])
    with pytest.raises(lr.PatternError, match=r"documents must end at the 13 keys of the sequence, but end at 12"):
        call(*inputs(), torch.tensor([0, 4, 12]))


def test_tables_where_the_graph_breaks():
    q, k, v = inputs()
    table = torch.tensor([0, 4, 13])
    s = run_ranks(1, lambda group: lr.Sharding(13, group))[0]  # a group that has no name

    def call(q, k, v):
        return lr.ring_attention(q, k, v, documents=table, sharding=s)

    assert_same_bits(results(torch.compile(call, backend="aot_eager"), (q, k, v)), results(call, (q, k, v)))


def test_another_pattern_is_another_graph():
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(lambda q, k, v, pattern: lr.attention(q, k, v, pattern=pattern), counter)
    for pattern in (lr.Dense(), lr.Dense(causal=False), lr.Dilated([4, 16], [1, 2]), lr.Dense()):
        got = results(lambda *x, pattern=pattern: call(*x, pattern), inputs())
        assert_same_bits(got, results(partial(lr.attention, pattern=pattern), inputs()))
    assert counter.frame_count == 3


# --------------------------------------------------------------------------------------------- as part of models


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = torch.nn.Linear(32, 64), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (8, 8)).split([4, 2, 2], dim=2)
        return x + self.out(lr.attention(q, k, v).flatten(2))


def trained(model, x, around=lambda run: run()):
    """The loss, and the gradient of every parameter and of x."""
    loss = around(lambda: model(x).float().square().mean())
    return loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])


def hidden():
    return torch.randn(2, 13, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager_decomp_partition"])
def test_a_layer(backend):
    model, x = Layer(), hidden()
    torch.testing.assert_close(trained(compiled(model, backend), x), trained(model, x))


def test_a_layer_as_users_compile_it():
    model, x = torch.nn.Sequential(Layer(), Layer()), hidden()
    want = trained(model, x)
    torch.testing.assert_close(trained(torch.compile(model, fullgraph=True), x), want)


def test_under_autocast():
    def around(run):
        with torch.autocast("cpu", torch.bfloat16):
            return run()

    model, x = Layer(), hidden()
    got, want = trained(compiled(model), x, around), trained(model, x, around)
    torch.testing.assert_close(got, want)


def test_checkpointed():
    model, x = Layer(), hidden()

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = model

        def forward(self, x):
            return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=False), use_reentrant=False)

    torch.testing.assert_close(
        trained(compiled(Checkpointed(), "aot_eager_decomp_partition"), x),
        trained(torch.nn.Sequential(model, model), x),
    )


# --------------------------------------------------------------------------------------------------- exported


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("pattern", [lr.Dense(window=(5, 0)), lr.Dilated([4, 64], [1, 2])], ids=["window", "dilated"])
def test_exported(strict, pattern):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return lr.attention(q, k, v, pattern=pattern, return_lse=True)

    n = torch.export.Dim("n", min=2, max=1000)
    dims = {name: {1: n} for name in "qkv"}
    program = torch.export.export(Attention(), tuple(inputs(13)), dynamic_shapes=dims, strict=strict)
    kept = io.BytesIO()
    torch.export.save(program, kept)
    kept.seek(0)
    again = torch.export.load(kept).module()
    for n in (13, 29):
        want = lr.attention(*inputs(n), pattern=pattern, return_lse=True)
        for got in (program.module()(*inputs(n)), again(*inputs(n))):
            assert_same_bits(got, want)


@pytest.mark.parametrize("strict", [True, False])
def test_exported_with_numbers_that_follow_the_sequence(strict):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            n = q.shape[1]
            near = lr.ring_attention(q, k, v, window=(n // 2, 0), query_offset=n // 3)
            return near + lr.dilated_attention(q, k, v, segment_lengths=[4, n], dilation_rates=[1, 2])

    n = torch.export.Dim("n", min=2, max=1000)
    dims = {name: {1: n} for name in "qkv"}
    program = torch.export.export(Attention(), tuple(inputs(13)), dynamic_shapes=dims, strict=strict)
    for n in (13, 29):
        assert program.module()(*inputs(n)).equal(Attention()(*inputs(n)))


# -------------------------------------------------------------------------------------------- what is refused

WRONG = {
    "no batch": (lambda q, k, v: lr.attention(q[0], k, v), "q must be [batch, n, heads, d], got shape [13, 4, 8]"),
    "heads": (lambda q, k, v: lr.attention(q[:, :, :3], k, v), "heads must be a multiple of kv_heads, got 3 and 2"),
    "dtypes": (lambda q, k, v: lr.attention(q, k.double(), v), "q, k and v must have one dtype"),
    "window": (lambda q, k, v: lr.ring_attention(q, k, v, window=(-3, 0)), "window's left must be at least 0"),
    "rates": (
        lambda q, k, v: lr.dilated_attention(q, k, v, segment_lengths=[4], dilation_rates=[1, 2]),
        "segment_lengths and dilation_rates must pair up, got 1 and 2",
    ),
    "documents": (
        lambda q, k, v: lr.ring_attention(q, k, v, documents=[0, 12]),
        "documents must end at the 13 keys of the sequence, but end at 12",
    ),
    "pattern": (lambda q, k, v: lr.attention(q, k, v, pattern="causal"), "pattern must be longring.Dense(...)"),
    "kernel": (lambda q, k, v: lr.attention(q, k, v, kernel="quick"), "kernel must be one of auto, "),
    "kernel that is no name": (lambda q, k, v: lr.attention(q, k, v, kernel=3), "kernel must be one of auto, "),
    "schedule": (lambda q, k, v: lr.attention(q, k, v, schedule="round"), "schedule must be one of "),
    "scale": (lambda q, k, v: lr.attention(q, k, v, scale="much"), "scale must be a finite number, got 'much'"),
    "timeout": (lambda q, k, v: lr.attention(q, k, v, timeout=-1.0), "timeout must be a positive number of seconds"),
    "offset": (lambda q, k, v: lr.attention(q, k, v, query_offset=0.5), "query_offset must be a whole number, got 0.5"),
    "deterministic": (lambda q, k, v: lr.attention(q, k, v, deterministic=1), "deterministic must be True or False"),
    "return_lse": (lambda q, k, v: lr.attention(q, k, v, return_lse=1), "return_lse must be True or False, got 1"),
    "dropout": (lambda q, k, v: lr.attention(q, k, v, dropout_p=0.1), "dropout is not built yet"),
    "layout": (lambda q, k, v: lr.attention(q, k, v, layout="zigzag"), "layout='zigzag' needs group=..."),
    "no tokens": (lambda q, k, v: lr.attention(q[:, :0], k, v), "q has no tokens"),
    "too few": (lambda q, k, v: lr.attention(q, k, v, sharding=TWELVE), "q holds 13 tokens, but zigzag deals 12 of 12"),
}
TWELVE = lr.Sharding(12)


@pytest.mark.parametrize(("call", "text"), WRONG.values(), ids=WRONG)
def test_errors_keep_their_words(call, text):
    with pytest.raises(lr.ArgumentError) as eager:
        call(*inputs())
    assert text in str(eager.value)
    with pytest.raises(Exception, match=re.escape(text)):  # the compiler may put it into one of its own
        compiled(call)(*inputs())
    with pytest.raises(type(eager.value)) as usual:  # where graphs may break, it is ours
        torch.compile(call, backend="aot_eager")(*inputs())
    assert str(usual.value) == str(eager.value)


@pytest.mark.parametrize("function", [lr.attention, lr.ring_attention])
def test_what_does_nothing_elsewhere_compiles(function):
    q, k, v = inputs()

    def call(q, k, v):
        return function(q, k, v, dropout_p=0.0, attn_mask=None, schedule="ring")

    assert_same_bits(compiled(call)(q, k, v), function(q, k, v, schedule="ring"))


# ------------------------------------------------------------------------------------------------- torch.func


def test_transforms_of_torch_func_are_refused():
    q, k, v = (x.detach() for x in inputs())

    def loss(q):
        return lr.attention(q, k, v).sum()

    for refused in (
        lambda: torch.func.grad(loss)(q),
        lambda: torch.func.vmap(loss)(torch.stack((q, q))),
        lambda: torch.func.jvp(loss, (q,), (q,)),
        lambda: torch.func.hessian(loss)(q),
    ):
        with pytest.raises(lr.NotBuilt, match=r"transforms of torch\.func"):
            refused()


def test_forward_mode_is_refused():
    q, k, v = inputs()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), k.detach().repeat(1, 1, 2, 1))
        for call in (lr.attention, compiled(lr.attention)):
            with pytest.raises(Exception, match=r"jvp|forward"):
                call(dual, k, v)


def test_transforms_in_compiled_code_are_right_or_refused():
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(Exception, match="functorch transforms"):
        compiled(torch.func.grad(lambda q: lr.attention(q, k, v).sum()))(q)


# ------------------------------------------------------------------------------------------ where nobody compiles


def test_eager_calls_load_no_compiler():
    script = """
import sys, torch, longring as lr
x = torch.randn(1, 5, 2, 4, requires_grad=True)
lr.attention(x, x, x).sum().backward()
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    assert not {"torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd"} & set(done.stdout.split())
