"""flash-attn 2, 3 and 4, for which packages with the same arguments stand in that compute in plain PyTorch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import longring as lr
from choices import forget_choices
from longring.kernels import fused, totals
from longring.kernels.operations import flash_attn
from longring.kernels.operations.contract import Rows
from longring.kernels.operations.flash_attn import FlashAttn2, FlashAttn3, FlashAttn4
from longring.kernels.rates import RANKS, Size, by_speed
from longring.kernels.select import KERNELS, PACKAGES, select_kernel
from longring.testing import Result, judge

pytestmark = pytest.mark.skipif(
    any(find_spec(name) for name in ("flash_attn", "flash_attn_interface")),
    reason="a flash-attn package is installed, whose place the stand-ins would take: tests/gpu has it compute",
)

STAND_INS = Path(__file__).parent / "stand_ins"
FOLDERS = {FlashAttn2: "two", FlashAttn3: "three", FlashAttn4: "four"}
VERSIONS = {FlashAttn2: "2.8.3", FlashAttn3: "3.0.0", FlashAttn4: "4.0.0b36"}
NAMES = {kind: kind.name for kind in FOLDERS}
every_kind = pytest.mark.parametrize("kind", FOLDERS, ids=NAMES.values())

PATTERNS = {
    "causal": lr.Dense(causal=True),
    "full": lr.Dense(causal=False),
    "left window": lr.Dense(causal=True, window=(7, 0)),
    "window": lr.Dense(causal=False, window=(9, 4)),
    "documents": lr.Dense(documents=[0, 7, 8, 30, 45]),
    "dilated": lr.Dilated([8, 16, 45], [1, 2, 4]),
    "dilated in blocks": lr.Dilated([12, 48], [1, 3], causal=False, phase="block"),
}


def forget():
    """What was found out of packages, and what was imported of them."""
    for found in (flash_attn.is_there, flash_attn._version_of, flash_attn._loaded, flash_attn._broken):
        found.cache_clear()
    forget_choices()
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a stand-in, or another folder, on the path, with a version as pip records it."""

    def put(kind, version=None, folder=None):
        name, version = kind.package.name, version or VERSIONS[kind]
        record = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for place in (tmp_path, STAND_INS, folder or STAND_INS / FOLDERS[kind]):
            monkeypatch.syspath_prepend(str(place))
        forget()

    forget()
    yield put
    forget()


@pytest.fixture
def on_gpu(monkeypatch):
    """The tensors are on a CPU, and taken for those of a GPU of the generation that is set, with any dtype."""

    def not_for(q, head_dim, *, least, most, dtypes):
        return f"takes at most {most}" if head_dim > most else None

    def become(major, minor=0):
        monkeypatch.setattr(flash_attn, "capability", lambda device: (major, minor))
        forget_choices()

    monkeypatch.setattr(flash_attn, "not_for", not_for)
    monkeypatch.setattr(flash_attn, "not_on_cuda", lambda q: None)
    become(9)
    return become


@pytest.fixture
def kernel(install, on_gpu, kind, monkeypatch):
    """By its name, installed and with a GPU. The stand-in is right for every head dimension."""
    install(kind)
    monkeypatch.setattr(FlashAttn4, "right_for", range(8, 257, 8))
    return kind.name


def tensors(dtype, *, heads=4, kv_heads=4, n=45, d=16, batch=2):
    draw = torch.Generator().manual_seed(0)
    shapes = [(batch, n, heads, d), (batch, n, kv_heads, d), (batch, n, kv_heads, d), (batch, n, heads, d)]
    q, k, v, dout = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    dlse = torch.randn(batch, heads, n, generator=draw)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout, dlse


def check(kernel, pattern, q, k, v, dout, dlse=None, **options):
    out, lse = lr.attention(q, k, v, pattern=pattern, kernel=kernel, return_lse=True, **options)
    outputs, given = ((out, lse), (dout, dlse)) if dlse is not None else (out, dout)
    keep_budgets(Result(out, lse, *torch.autograd.grad(outputs, (q, k, v), given)), pattern, q, k, v, dout, dlse)


def keep_budgets(got, pattern, q, k, v, dout, dlse):
    verdicts = judge(got, q, k, v, pattern, dout, dlse)
    assert all(verdict.ok for verdict in verdicts), verdicts


def told_of_determinism():
    return importlib.import_module("plain").said


# ------------------------------------------------------------------------------------------------ what is computed


@every_kind
@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_every_pattern(kernel, pattern, dtype, kv_heads, with_dlse):
    q, k, v, dout, dlse = tensors(dtype, kv_heads=kv_heads)
    check(kernel, pattern, q, k, v, dout, dlse if with_dlse else None)


@every_kind
@pytest.mark.parametrize("pattern", [PATTERNS["causal"], PATTERNS["dilated"]], ids=["causal", "dilated"])
def test_the_rows_of_a_ring(kernel, pattern):
    """A tile's backward is given the out and lse of rows that saw other tiles too."""
    q, k, v, dout, dlse = tensors(torch.bfloat16, kv_heads=2)
    sim = lr.simulate(q, k, v, ranks=3, pattern=pattern, kernel=kernel)
    got = Result(sim.out, sim.lse, *torch.autograd.grad((sim.out, sim.lse), (q, k, v), (dout, dlse)))
    keep_budgets(got, pattern, q, k, v, dout, dlse)


def test_flash_attn_4_writes_where_it_is_told(install, on_gpu):
    """Into rows of a tensor that lie anywhere, and nowhere else."""
    install(FlashAttn4)
    operation = FlashAttn4()
    q, k, v, dout, dlse = (x.detach() for x in tensors(torch.bfloat16))
    q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
    out, lse = operation.forward(q, k, v, True, 0.25)
    rows = Rows(dout, out, lse, dlse)
    want = out, *operation.backward(rows, q, k, v, True, 0.25)
    rooms = [torch.full((2, 2 * x.shape[2], *x.shape[1::2]), torch.nan, dtype=x.dtype) for x in want]
    homes = [room[:, ::2].transpose(1, 2) for room in rooms]
    assert operation.forward_into(homes[0], q, k, v, True, 0.25).equal(lse)
    operation.backward_into((homes[1], None, homes[3]), rows, q, k, v, True, 0.25)
    assert [torch.equal(*one) for one in zip(homes, want, strict=True)] == [True, True, False, True]
    assert all(room[:, 1::2].isnan().all() for room in rooms)


@every_kind
@pytest.mark.parametrize("d", [8, 72, 256])
def test_every_head_dimension(kernel, d):
    """At 256 there is no room for the columns of a gradient of lse: the reference computes that."""
    q, k, v, dout, dlse = tensors(torch.bfloat16, n=12, d=d)
    check(kernel, lr.Dense(), q, k, v, dout)
    check(kernel, lr.Dense(), q, k, v, dout, dlse)


def test_a_gradient_of_lse_takes_as_few_columns_as_there_can_be():
    assert [kind().columns_for_dlse(248) for kind in FOLDERS] == [8, 8, 0]
    assert [kind().columns_for_dlse(20) for kind in FOLDERS] == [12, 12, 0]


@every_kind
def test_the_same_bits_are_asked_for_only_where_they_are_wanted(kernel):
    q, k, v, dout, dlse = tensors(torch.bfloat16)
    told = told_of_determinism()
    for deterministic in (False, True):
        told.clear()
        check(kernel, PATTERNS["dilated"], q, k, v, dout, dlse, deterministic=deterministic)
        assert set(told) == {deterministic}


@every_kind
def test_the_operation_of_the_same_bits_is_one_and_stays_so(kind):
    """What was chosen is remembered by operation."""
    strict = kind().with_the_same_bits()
    assert type(strict) is kind
    assert strict.is_deterministic
    assert strict is kind().with_the_same_bits() is strict.with_the_same_bits()


@every_kind
def test_auto_takes_it_for_tensors_that_it_computes(kernel):
    q, k, *_ = tensors(torch.bfloat16)
    assert kernel in select_kernel("auto", q, k)[0].name.split(" or ")


# ------------------------------------------------------------------------------ windows uncut, and many sequences

WINDOWS = {
    "causal": lr.Dense(window=(7, 0)),
    "both sides": lr.Dense(causal=False, window=(9, 4)),
    "of one key": lr.Dense(causal=False, window=(0, 0)),
    "to the right": lr.Dense(causal=False, window=(0, 11)),
    "without a limit": lr.Dense(causal=False, window=(None, 3)),
}
SEQUENCES = {
    "documents": lr.Dense(documents=[0, 7, 8, 30, 45]),
    "equal documents": lr.Dense(documents=range(0, 46, 9)),
    "full documents": lr.Dense(causal=False, documents=[0, 7, 8, 30, 45]),
    "documents of each batch row": lr.Dense(documents=[[0, 7, 8, 30, 45], [0, 20, 45]]),
    "windows in documents": lr.Dense(window=(7, 0), documents=[0, 3, 4, 30, 45]),
}


@pytest.fixture
def lazily(monkeypatch):
    """Parts wait for each other, as on a GPU."""
    triton = pytest.importorskip("triton", reason="needs the package triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs Triton's interpreter")
    for module in (totals, fused):
        monkeypatch.setattr(module, "is_lazy", lambda _: True)


@pytest.fixture
def launched(kernel, lazily):
    """(sequences or None, window) of every launch."""
    found = importlib.import_module("plain").launched
    found.clear()
    return found


def slope(kind, dlse):
    """A gradient of lse, for those that take it as it is: with it the others compute stack by stack."""
    return dlse if kind is FlashAttn4 else None


@every_kind
@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("pattern", WINDOWS.values(), ids=WINDOWS)
def test_a_window_is_one_launch(kind, kernel, launched, pattern, kv_heads, with_dlse, monkeypatch):
    never_merged(monkeypatch)
    q, k, v, dout, dlse = tensors(torch.bfloat16, kv_heads=kv_heads)
    check(kernel, pattern, q, k, v, dout, slope(kind, dlse) if with_dlse else None)
    assert len(launched) == 2
    assert all(count is None for count, _ in launched)


@every_kind
@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("pattern", SEQUENCES.values(), ids=SEQUENCES)
def test_documents_are_one_launch(kind, kernel, launched, pattern, kv_heads, with_dlse, monkeypatch):
    never_merged(monkeypatch)
    q, k, v, dout, dlse = tensors(torch.bfloat16, kv_heads=kv_heads)
    check(kernel, pattern, q, k, v, dout, slope(kind, dlse) if with_dlse else None)
    assert len(launched) == 2
    assert all(count is not None and count > 5 for count, _ in launched)


@every_kind
@pytest.mark.parametrize("pattern", [WINDOWS["causal"], SEQUENCES["documents"]], ids=["window", "documents"])
def test_with_a_gradient_of_lse_columns_are_for_stacks_alone(kind, kernel, launched, pattern):
    q, k, v, dout, dlse = tensors(torch.bfloat16)
    check(kernel, pattern, q, k, v, dout, dlse)
    (forward, *backward) = launched
    assert forward != (None, (None, None))
    assert (len(backward) > 1) == (kind is not FlashAttn4)


@pytest.mark.parametrize("left_out", ["LOCAL", "VARLEN"])
@pytest.mark.parametrize("kind", [FlashAttn3], ids=["flash_attn_3"])
def test_flash_attn_3_as_it_was_built(kernel, launched, left_out, monkeypatch):
    flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    monkeypatch.setitem(flags, f"FLASHATTENTION_DISABLE_{left_out}", True)
    q, k, v, dout, _ = tensors(torch.bfloat16)
    for pattern in (WINDOWS["causal"], SEQUENCES["documents"]):
        check(kernel, pattern, q, k, v, dout)
    assert set(launched) == {(None, (None, None))}  # squares and rectangles


@every_kind
def test_equal_documents_of_one_batch_row_are_one_stack_and_yet_sequences(kind, kernel, launched, monkeypatch):
    never_merged(monkeypatch)
    q, k, v, dout, dlse = tensors(torch.bfloat16, batch=1)
    check(kernel, SEQUENCES["equal documents"], q, k, v, dout, slope(kind, dlse))
    assert [count for count, _ in launched] == [5, 5]


def never_merged(monkeypatch):
    for name in ("merge_parts", "add_parts"):
        monkeypatch.setattr(f"longring.kernels.triton.parts.{name}", lambda *_, **__: pytest.fail("merged"))


@every_kind
def test_results_lie_as_the_tensors_do(kernel, launched):
    q, k, v, dout, _ = tensors(torch.bfloat16)
    for pattern in (*WINDOWS.values(), *SEQUENCES.values()):
        out, lse = lr.attention(q, k, v, pattern=pattern, kernel=kernel, return_lse=True)
        found = out, lse, *torch.autograd.grad(out, (q, k, v), dout)
        assert all(x.is_contiguous() for x in found)


@every_kind
def test_batch_rows_that_do_not_follow_each_other(kernel, launched):
    whole = [x.detach() for x in tensors(torch.bfloat16, n=60)[:4]]
    q, k, v, dout = (x[:, 5:50] for x in whole)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    for pattern in (SEQUENCES["documents"], WINDOWS["causal"]):
        check(kernel, pattern, q, k, v, dout)
    assert len(launched) == 4


@every_kind
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(kernel, launched, scale):
    q, k, v, dout, _ = tensors(torch.bfloat16)
    for pattern in (SEQUENCES["documents"], WINDOWS["causal"]):
        out, lse = lr.attention(q, k, v, pattern=pattern, kernel=kernel, return_lse=True, scale=scale)
        got = Result(out, lse, *torch.autograd.grad(out, (q, k, v), dout))
        verdicts = judge(got, q, k, v, pattern, dout, scale=scale)
        assert all(verdict.ok for verdict in verdicts), verdicts
    assert len(launched) == 4


@every_kind
def test_queries_behind_a_cached_prefix_are_one_launch(kind, kernel, launched):
    q, k, v, dout, dlse = tensors(torch.bfloat16)
    q = q.detach()[:, :9].requires_grad_()
    check(kernel, lr.Dense(), q, k, v, dout[:, :9], slope(kind, dlse[:, :, :9]))
    assert launched == [(None, (None, None))] * 2  # causal, as it is aligned


@every_kind
@pytest.mark.parametrize("schedule", ["ring", "exchange", "gather", "ulysses"])
@pytest.mark.parametrize("name", ["dense", "causal", "both sides", "documents", "windows in documents"])
def test_over_ranks(kind, kernel, launched, name, schedule):
    """In a ring's backward the keys of a rank are cut in two: of the first half queries are more than keys."""
    pattern = {"dense": lr.Dense(), **WINDOWS, **SEQUENCES}[name]
    q, k, v, dout, dlse = tensors(torch.bfloat16, kv_heads=2, batch=1)
    for layout in ("contiguous", "zigzag"):
        sim = lr.simulate(q, k, v, ranks=3, pattern=pattern, kernel=kernel, schedule=schedule, layout=layout)
        outputs, given = ((sim.out, sim.lse), (dout, dlse)) if kind is FlashAttn4 else (sim.out, dout)
        got = Result(sim.out, sim.lse, *torch.autograd.grad(outputs, (q, k, v), given))
        keep_budgets(got, pattern, q, k, v, dout, slope(kind, dlse))
    if name != "dense":
        assert any(count is not None or window != (None, None) for count, window in launched)


@every_kind
def test_documents_are_one_launch_forward_however_long_they_are(kind, kernel, launched, monkeypatch):
    """The backward, which holds sums of its own, goes slab by slab."""
    monkeypatch.setattr("longring.geometry.portions.SMALLEST_SLAB", 1)
    q, k, v, dout, dlse = tensors(torch.bfloat16, batch=1)
    check(kernel, lr.Dense(documents=[*range(0, 45, 2), 45]), q, k, v, dout, slope(kind, dlse))
    first, *others = [count for count, _ in launched]
    assert first == sum(others) == 23
    assert len(others) > 1


@every_kind
def test_the_same_bits_where_they_are_asked_for_of_sequences(kind, kernel, launched):
    told = told_of_determinism()
    told.clear()
    q, k, v, dout, dlse = tensors(torch.bfloat16)
    for pattern in (SEQUENCES["documents"], WINDOWS["causal"]):
        check(kernel, pattern, q, k, v, dout, slope(kind, dlse), deterministic=True)
    assert set(told) == {True}


# ------------------------------------------------------------------------------------------------- what is refused


@every_kind
def test_a_package_that_is_not_installed(install, on_gpu, kind):
    why = kind().refusal(torch.empty(0), 64)
    assert why.startswith(f"needs the package {kind.package.name}, which is not installed (")
    q, k, v, *_ = tensors(torch.bfloat16)
    with pytest.raises(lr.KernelRefusal, match=kind.package.name):
        lr.attention(q, k, v, kernel=kind.name)


def test_flash_attn_3_that_does_not_say_how_it_was_built(install, on_gpu, tmp_path):
    """As others package it: refused, and no error of an import."""
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "flash_attn_interface.py").write_text("")
    install(FlashAttn3, folder=folder)
    assert "flash_attn_config cannot be imported" in FlashAttn3().refusal(torch.empty(0), 64)


@pytest.mark.parametrize(
    ("kind", "old", "least"),
    [
        (FlashAttn2, "2.7.4.post1", "2.8.0"),
        (FlashAttn2, "1.0.9", "2.8.0"),
        (FlashAttn3, "3.0.0b1", "3.0.0"),
        (FlashAttn4, "4.0.0b9", "4.0.0b36"),
    ],
)
def test_a_version_with_other_arguments(install, on_gpu, kind, old, least):
    install(kind, version=old)
    why = kind().refusal(torch.empty(0), 64)
    assert why.startswith(f"needs {kind.package.name} {least} or later, and {old} is installed")


@pytest.mark.parametrize(
    ("kind", "new"),
    [
        (FlashAttn2, "2.8.0"),
        (FlashAttn2, "2.8.3.post1+cu12torch2.11cxx11abiTRUE"),
        (FlashAttn3, "3.0.0+cu130"),
        (FlashAttn3, "3.0.1"),
        (FlashAttn4, "4.0.0b100"),
        (FlashAttn4, "4.0.0rc1"),
        (FlashAttn4, "4.0.0"),
    ],
)
def test_a_version_with_the_same_arguments(install, on_gpu, kind, new):
    install(kind, version=new)
    assert kind().refusal(torch.empty(0), 64) is None


def test_versions_in_their_order():
    order = ["2.6.3", "2.7.0", "2.7.4.post1", "2.10.0", "4.0.0a1", "4.0.0b9", "4.0.0.b36", "4.0.0rc1", "4.0.0", "4.0.1"]
    assert all(flash_attn._age(a) < flash_attn._age(b) for a, b in pairwise(order))
    assert flash_attn._age("unknown") < flash_attn._age("0.1")


@every_kind
def test_a_version_that_is_not_recorded(install, on_gpu, kind, monkeypatch):
    monkeypatch.syspath_prepend(str(STAND_INS / FOLDERS[kind]))
    assert "is not recorded" in kind().refusal(torch.empty(0), 64)


def test_flash_attn_4_is_not_taken_for_flash_attn_2(install, on_gpu):
    """They share the folder flash_attn, with or without a part of each other."""
    install(FlashAttn4)
    assert FlashAttn4().refusal(torch.empty(0), 64) is None
    assert "not installed" in FlashAttn2().refusal(torch.empty(0), 64)


def test_flash_attn_2_is_not_taken_for_flash_attn_4(install, on_gpu):
    install(FlashAttn2)
    assert FlashAttn2().refusal(torch.empty(0), 64) is None
    assert "not installed" in FlashAttn4().refusal(torch.empty(0), 64)


def test_a_package_compiled_for_another_pytorch(install, on_gpu, tmp_path):
    folder = tmp_path / "built" / "flash_attn"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol: _ZN3c105')\n")
    install(FlashAttn2, folder=folder.parent)
    why = FlashAttn2().refusal(torch.empty(0), 64)
    assert why == ("is installed, but flash_attn.flash_attn_interface cannot be imported: undefined symbol: _ZN3c105")


@every_kind
@pytest.mark.parametrize("head_dim", [1, 20, 100])
def test_head_dimensions_between_steps_of_8(install, on_gpu, kind, head_dim):
    install(kind)
    assert kind().refusal(torch.empty(0), head_dim) == f"takes head dimensions in steps of 8, got {head_dim}"


@every_kind
def test_head_dimensions_above_256(install, on_gpu, kind):
    install(kind)
    assert kind().refusal(torch.empty(0), 264) == "takes at most 256"


@every_kind
def test_a_cpu(install, kind):
    install(kind)
    assert "CUDA devices only" in kind().refusal(torch.empty(0, dtype=torch.bfloat16), 64)
    assert kind.package.module not in sys.modules


@pytest.mark.parametrize("head_dim", [8, 16, 72, 96, 192])
def test_flash_attn_4_where_it_was_wrong_or_was_not_tried(install, on_gpu, head_dim):
    install(FlashAttn4)
    assert "gave wrong gradients" in FlashAttn4().refusal(torch.empty(0), head_dim)
    assert [FlashAttn4().refusal(torch.empty(0), right) for right in (64, 128, 256)] == [None] * 3


@pytest.mark.parametrize("major", [10, 12])
def test_flash_attn_3_after_hopper(install, on_gpu, major):
    install(FlashAttn3)
    on_gpu(major)
    assert f"Hopper (9.x) only, and cpu has {major}.0" in FlashAttn3().refusal(torch.empty(0), 64)


@pytest.mark.parametrize("major", [10, 11, 12])
def test_flash_attn_4_after_hopper(install, on_gpu, major):
    install(FlashAttn4)
    on_gpu(major)
    there = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    assert FlashAttn4().refusal(there, 128) is None
    assert FlashAttn4().refusal(there, 136) == "takes at most 128"
    strict = FlashAttn4(is_deterministic=True).refusal(there, 128)
    assert strict == ("adds up in any order on compute capability 12.x, which cuda has" if major == 12 else None)


def test_the_same_bits_of_flash_attn_3_end_below_256(install, on_gpu):
    install(FlashAttn3)
    free, strict = FlashAttn3(), FlashAttn3(is_deterministic=True)
    assert (free.refusal(torch.empty(0), 256), strict.refusal(torch.empty(0), 192)) == (None, None)
    assert "at most 192, got 200" in strict.refusal(torch.empty(0), 200)
    q, k, v, dout, dlse = tensors(torch.bfloat16, n=12, d=192)
    check("flash_attn_3", lr.Dense(), q, k, v, dout, dlse, deterministic=True)  # 200 columns with those of dlse


@pytest.mark.parametrize(
    ("left_out", "refused"),
    [
        (["BACKWARD"], {64: "was built without its backward pass"}),
        (["FP16"], {64: "was built without float16"}),
        (["HDIM256"], {192: None, 200: "as it was built takes a head dimension of at most 192, got 200"}),
        (["HDIM64"], {64: None}),  # computed as 96
        (["HDIM192", "HDIM256"], {128: None, 136: "as it was built takes a head dimension of at most 128, got 136"}),
    ],
    ids=str,
)
def test_what_was_left_out_of_a_build(install, on_gpu, monkeypatch, left_out, refused):
    install(FlashAttn3)
    flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    for name in left_out:
        monkeypatch.setitem(flags, f"FLASHATTENTION_DISABLE_{name}", True)
    for head_dim, why in refused.items():
        assert FlashAttn3().refusal(torch.empty(0, dtype=torch.float16), head_dim) == why


# -------------------------------------------------------------------------------------------------- where it stands


def test_every_one_can_be_asked_for_by_name_and_has_a_rank():
    assert {operation.name for operation in PACKAGES} == set(NAMES.values()) <= set(KERNELS)
    assert set(NAMES.values()) <= set(RANKS["hopper"])
    assert "flash_attn_3" not in RANKS["ampere"] + RANKS["blackwell"]


@pytest.mark.parametrize(("generation", "first"), [("ampere", "flash_attn_2"), ("blackwell", "flash_attn_4")])
def test_the_first_choice_where_nobody_measured(generation, first):
    names = ("efficient", "flash", "flash_attn_2", "flash_attn_4")
    known = tuple(name for name in names if name in RANKS[generation])
    assert by_speed(known, "forward", Size(64, 16, 1024, 1024, True), generation)[0] == first


def test_importing_longring_imports_none_of_them():
    path = [str(STAND_INS), *(str(STAND_INS / folder) for folder in ("two", "three"))]
    script = f"import sys; sys.path[:0] = {path}; import longring; longring.attention; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    assert not [name for name in done.stdout.split() if name.startswith("flash_attn")]
    assert "longring.kernels.operations.flash_attn" in done.stdout.split()
