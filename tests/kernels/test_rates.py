"""Which operation computes a stack, on pretended GPUs: the measured fastest, and elsewhere the first by rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import longring as lr
from choices import forget_choices
from longring.errors import KernelRefusal
from longring.kernels import rates, recipes, select
from longring.kernels.fused import FusedKernel
from longring.kernels.operations import flash_attn
from longring.kernels.places import Place, Stack
from longring.kernels.rates import HOPPER, RANKS, UNPLANNED, WORTH_A_PLAN, Case, Size, by_speed, generation
from longring.kernels.recipes import Asked
from longring.kernels.reference import ReferenceKernel
from longring.kernels.select import KERNELS, OTHER_BITS, select_kernel

MEASURED = ("flash_attn_4", "flash_attn_3", "cudnn", "flash", "efficient")
PASSES = ("forward", "backward")
FA4 = "flash-attn-4"
TURING, AMPERE, ADA, HOPPER_GPU, BLACKWELL = (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)


def size_of(case: Case) -> Size:
    return Size(case.d, case.heads, case.rows, case.cols, case.causal)


def rate(case: Case, name: str, which: str) -> int:
    return getattr(case, name)[PASSES.index(which)]


# ------------------------------------------------------------------------------------------------------ the table


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("case", HOPPER, ids=lambda case: str(tuple(case[:5])))
def test_a_measured_case_goes_from_its_fastest_to_its_slowest(case, which):
    ordered = by_speed(MEASURED, which, size_of(case), "hopper")
    assert sorted(ordered) == sorted(MEASURED)
    is_worth_it = size_of(case).flops >= WORTH_A_PLAN
    nearest = rates._nearest(size_of(case))  # itself, or one that is as much higher as this is wider
    assert nearest == case or (nearest.rows, nearest.cols) == (case.cols, case.rows)
    found = [rate(nearest, name, which) for name in ordered if is_worth_it or name != "cudnn"]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("kind", ["hopper", "blackwell", "ampere"])
@pytest.mark.parametrize("which", PASSES)
def test_little_work_is_not_worth_a_plan(which, kind):
    little, much = Size(128, 16, 500, 500, True), Size(128, 16, 5000, 5000, True)
    assert little.flops < WORTH_A_PLAN < much.flops
    for names in (("cudnn", "flash"), ("cudnn", "flash", "efficient", "triton"), MEASURED):
        assert by_speed(names, which, little, kind)[0] in UNPLANNED
    assert by_speed(("cudnn", "triton"), which, little, kind)[0] == "cudnn"  # nothing else is as fast
    if kind != "ampere":
        assert by_speed(("cudnn", "flash"), which, much, kind)[0] == "cudnn"


def test_every_case_was_measured_once_and_of_every_operation():
    sizes = [size_of(case) for case in HOPPER]
    assert len(set(sizes)) == len(sizes)
    assert all(rate(case, name, which) > 0 for case in HOPPER for name in MEASURED for which in PASSES)
    assert all(case.rows == case.cols for case in HOPPER if case.causal)


@pytest.mark.parametrize(
    ("which", "size", "want"),
    [
        ("forward", Size(64, 8192, 128, 128, True), "cudnn"),  # many tiny tiles
        ("backward", Size(64, 8192, 128, 128, True), "efficient"),
        ("forward", Size(128, 8192, 128, 128, True), "cudnn"),
        ("backward", Size(128, 8192, 128, 128, True), "flash_attn_4"),
        ("forward", Size(64, 16, 1 << 20, 1 << 20, True), "flash_attn_4"),  # beyond the largest
        ("backward", Size(128, 1, 1, 1, False), "flash_attn_4"),  # below the smallest
        ("forward", Size(256, 16, 8192, 8192, True), "flash_attn_4"),  # d beyond, and between
        ("forward", Size(96, 16, 8192, 8192, True), "flash_attn_4"),
    ],
)
def test_what_comes_first(which, size, want):
    without_3 = tuple(name for name in MEASURED if name != "flash_attn_3")
    assert by_speed(without_3, which, size, "hopper")[0] == want


@pytest.mark.parametrize(
    ("which", "size", "want"),
    [
        ("forward", Size(128, 512, 2048, 2048, True), "flash_attn_3"),  # a branch of LongNet
        ("backward", Size(128, 512, 2048, 2048, True), "flash_attn_4"),
        ("backward", Size(128, 16, 32768, 32768, True), "flash_attn_4"),
        ("forward", Size(64, 8192, 128, 128, True), "cudnn"),
    ],
)
def test_what_comes_first_where_flash_attn_3_is_installed_too(which, size, want):
    assert by_speed(MEASURED, which, size, "hopper")[0] == want


@given(
    st.builds(
        Size,
        st.sampled_from([32, 64, 80, 128, 256]),
        st.integers(1, 1 << 14),
        st.integers(1, 1 << 20),
        st.integers(1, 1 << 20),
        st.booleans(),
    ),
    st.sampled_from(PASSES),
    st.sampled_from(sorted(RANKS)),
    st.permutations(["cudnn", "triton", "efficient", "flash", "flash_attn_4", "somebody_else", "another"]),
)
def test_any_size_has_an_order_whatever_the_names_come_in(size, which, kind, names):
    ordered = by_speed(tuple(names), which, size, kind)
    assert sorted(ordered) == sorted(names)
    is_known = [name in RANKS[kind] for name in ordered]
    assert is_known == sorted(is_known, reverse=True)


@pytest.mark.parametrize("kind", ["ampere", "blackwell"])
def test_without_measurements_names_go_by_rank(kind):
    names = tuple(reversed(RANKS[kind]))
    size = Size(64, 16, 4096, 4096, True)
    assert by_speed(("somebody_else", *names), "forward", size, kind) == (*RANKS[kind], "somebody_else")


def test_what_nobody_measured_stands_behind_all_that_rank_before_it():
    names = ("somebody_else", "triton", *MEASURED, "flash_attn_2")
    first, second, *ordered = by_speed(names, "forward", Size(128, 16, 8192, 8192, True), "hopper")
    assert {first, second} == {"flash_attn_4", "flash_attn_3"}
    assert ordered == ["cudnn", "flash_attn_2", "flash", "efficient", "triton", "somebody_else"]


def test_a_slow_one_that_is_fast_for_once_draws_nobody_else_to_the_front():
    """For tiny tiles efficient was the fastest: who ranks near it elsewhere is no faster for that."""
    ordered = by_speed(("triton", *MEASURED), "backward", Size(64, 8192, 128, 128, True), "hopper")
    assert ordered == ("efficient", "flash_attn_4", "flash_attn_3", "cudnn", "flash", "triton")


def measured_were(monkeypatch, *cases):
    monkeypatch.setattr(rates, "HOPPER", cases)
    for name in ("_nearest", "_points"):
        found = getattr(rates, name)
        monkeypatch.setattr(rates, name, getattr(found, "__wrapped__", found))


def test_equally_fast_ones_go_by_rank(monkeypatch):
    case = Case(64, 16, 8192, 8192, True, (5, 5), (5, 5), (5, 5), (5, 5), (5, 5))
    measured_were(monkeypatch, case)
    order = by_speed(tuple(reversed(MEASURED)), "forward", size_of(case), "hopper")
    assert order == MEASURED


def test_the_nearest_case_is_near_in_work_in_tiles_and_in_mask(monkeypatch):
    """Each differs from the size asked for in one of them alone, and says which it was by what is the fastest."""
    near = dict.fromkeys(MEASURED, (1, 1))

    def case(d, heads, rows, causal, fastest):
        return Case(d, heads, rows, rows, causal, **{**near, fastest: (9, 9)})

    def first(*cases):
        measured_were(monkeypatch, *cases)
        return by_speed(MEASURED, "forward", Size(64, 64, 512, 512, True), "hopper")[0]

    exact = case(64, 64, 512, True, "efficient")
    for other in (
        case(64, 64, 512, False, "flash"),
        case(64, 16, 512, True, "flash"),
        case(64, 256, 512, True, "flash"),
        case(64, 1024, 128, True, "flash"),  # the same work
        case(64, 64, 1024, True, "flash"),
        case(128, 64, 512, True, "flash"),
    ):
        assert first(other, exact) == first(exact, other) == "efficient"
    # the mask matters less than the size, and nothing as much as d
    assert first(case(64, 64, 512, False, "flash"), case(64, 64, 2048, True, "efficient")) == "flash"
    assert first(case(64, 8192, 8192, False, "flash"), case(128, 64, 512, True, "efficient")) == "flash"


@pytest.mark.parametrize(
    ("capability", "want"),
    [
        ((5, 2), "older"),
        ((7, 0), "older"),
        (TURING, "older"),
        (AMPERE, "ampere"),
        ((8, 6), "ampere"),
        (ADA, "ampere"),
        (HOPPER_GPU, "hopper"),
        (BLACKWELL, "blackwell"),
        ((10, 3), "blackwell"),
        ((12, 0), "blackwell"),
    ],
)
def test_generations(capability, want):
    assert generation(capability) == want
    assert want in RANKS


# ---------------------------------------------------------------------------------------------- pretended GPUs


@pytest.fixture
def gpu(monkeypatch):
    """Call it with a capability, and with what is installed; no tensor is on it."""
    refusal = flash_attn.Package.refusal

    def pretend(capability, *, packages=(), cudnn=True, triton=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: cudnn)
        monkeypatch.setattr(flash_attn, "is_there", lambda _: False)
        monkeypatch.setattr(flash_attn, "_broken", lambda _: None)
        monkeypatch.setattr(
            flash_attn.Package, "refusal", lambda package: None if package.name in packages else refusal(package)
        )
        monkeypatch.setattr(
            "longring.kernels.operations.triton.is_available", lambda _: triton and capability >= (7, 0)
        )
        forget_choices()

    stand_in = SimpleNamespace(
        cuda=torch.cuda, empty=lambda *_, dtype, device: SimpleNamespace(dtype=dtype, device=device)
    )
    monkeypatch.setattr(recipes, "torch", stand_in)
    monkeypatch.setattr(recipes, "_generation", recipes._generation.__wrapped__)  # which remembers
    yield pretend
    forget_choices()


def tensor(dtype=torch.bfloat16, d=64) -> Any:
    """What a choice looks at."""
    return SimpleNamespace(dtype=dtype, device=torch.device("cuda:0"), shape=(1, 4096, 16, d))


def stack(heads=16, rows=4096, cols=4096, shape="causal") -> Stack:
    place = Place(range(1), 1, 0, range(heads), 0, range(rows), 1)
    return Stack(place, place._replace(rows=range(cols)), hi=None if shape == "full" else 0)


def picked(q, which: Any = "forward", some=None, *, with_dlse=False, kernel="auto", deterministic=False):
    """The name of the operation that such a stack would be computed by."""
    chosen, _ = select_kernel(kernel, q, q, deterministic=deterministic)
    if not isinstance(chosen, FusedKernel):
        return chosen.name
    asked = Asked(which, q.shape, q.shape, q.dtype, q.device, True, True, True, with_dlse)
    operation = recipes.picked(chosen._operations, asked, recipes.size_of(some or stack(), q.shape[3]))
    return None if operation is None else operation.name


LARGE, TINY, ONE = stack(), stack(heads=8192, rows=128, cols=128), stack(rows=1, cols=1, shape="full")


@pytest.mark.parametrize(
    ("capability", "dtype", "want"),
    [
        (TURING, torch.float16, "efficient"),
        (TURING, torch.float32, "efficient"),
        (TURING, torch.bfloat16, "reference"),  # which Turing's tensor cores do not know
        (AMPERE, torch.bfloat16, "flash"),
        (AMPERE, torch.float16, "flash"),
        (AMPERE, torch.float32, "efficient"),
        (ADA, torch.bfloat16, "flash"),
        (HOPPER_GPU, torch.bfloat16, "cudnn"),
        (HOPPER_GPU, torch.float32, "efficient"),
        (HOPPER_GPU, torch.float64, "reference"),
        (BLACKWELL, torch.bfloat16, "cudnn"),
        (BLACKWELL, torch.float32, "efficient"),
    ],
)
@pytest.mark.parametrize("which", PASSES)
def test_a_generation_without_packages(gpu, capability, dtype, want, which):
    gpu(capability)
    assert picked(tensor(dtype), which) == want


@pytest.mark.parametrize("capability", [HOPPER_GPU, BLACKWELL])
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("d", [64, 128])
def test_flash_attn_4_takes_the_large_stacks_where_it_is_there(gpu, capability, which, d):
    gpu(capability, packages=[FA4])
    assert picked(tensor(d=d), which, LARGE) == "flash_attn_4"


def test_flash_attn_2_on_ampere(gpu):
    gpu(AMPERE, packages=["flash-attn"])
    assert picked(tensor()) == "flash_attn_2"
    assert picked(tensor(torch.float32)) == "efficient"


@pytest.mark.parametrize("capability", [TURING, AMPERE, ADA])
def test_flash_attn_4_is_no_good_before_hopper(gpu, capability):
    gpu(capability, packages=[FA4])
    assert picked(tensor(torch.float16)) == ("efficient" if capability == TURING else "flash")


@pytest.mark.parametrize(
    ("d", "which", "want"),
    [
        (64, "forward", "cudnn"),
        (64, "backward", "efficient"),
        (128, "forward", "cudnn"),
        (128, "backward", "flash_attn_4"),
    ],
)
def test_on_hopper_tiny_tiles_go_by_what_was_measured_forward_and_backward_apart(gpu, d, which, want):
    gpu(HOPPER_GPU, packages=[FA4])
    assert picked(tensor(d=d), which, TINY) == want


@pytest.mark.parametrize(("flash_attn_4", "want"), [(True, "flash_attn_4"), (False, "flash")])
def test_one_query_with_one_key_is_not_for_cudnn(gpu, flash_attn_4, want):
    gpu(HOPPER_GPU, packages=[FA4] if flash_attn_4 else [])
    assert picked(tensor(), "backward", ONE) == want
    assert picked(tensor(), "forward", ONE, kernel="cudnn") is None  # then the reference computes it


@pytest.mark.parametrize(
    ("d", "with_dlse", "want"),
    [(128, False, "cudnn"), (128, True, "flash"), (256, True, "efficient"), (264, False, "efficient")],
)
def test_head_dimensions_that_are_too_large_with_a_column_for_dlse(gpu, d, with_dlse, want):
    gpu(BLACKWELL)  # where cuDNN takes 128 and flash 256
    assert picked(tensor(d=d), "backward", with_dlse=with_dlse) == want


@pytest.mark.parametrize(("d", "want"), [(64, "flash_attn_4"), (68, "cudnn"), (72, "cudnn")])
def test_head_dimensions_that_are_for_flash_attn_4(gpu, d, want):
    gpu(HOPPER_GPU, packages=[FA4])
    assert picked(tensor(d=d)) == want


def test_what_this_pytorch_is_without_is_not_chosen(gpu):
    gpu(HOPPER_GPU, cudnn=False)
    assert picked(tensor()) == "flash"
    gpu(AMPERE, triton=False)
    assert picked(tensor(torch.float32)) == "efficient"


@pytest.mark.parametrize(
    ("capability", "flash_attn_4", "dtype", "want"),
    [
        (HOPPER_GPU, True, torch.bfloat16, "flash_attn_4"),
        (HOPPER_GPU, False, torch.bfloat16, "triton"),
        (AMPERE, True, torch.bfloat16, "triton"),
        (AMPERE, True, torch.float32, "triton"),
        (TURING, False, torch.float16, "reference"),
    ],
)
def test_the_same_bits_by_whom(gpu, capability, flash_attn_4, dtype, want):
    gpu(capability, packages=[FA4] if flash_attn_4 else [])
    for which in PASSES:
        assert picked(tensor(dtype), which, deterministic=True) == want
    kernel, _ = select_kernel("auto", tensor(dtype), tensor(dtype), deterministic=True)
    if isinstance(kernel, FusedKernel):
        assert all(operation.is_deterministic for operation in kernel._operations)


# ---------------------------------------------------------------------------------------------- kernels by name


def test_on_the_cpu_auto_is_sdpa():
    q = torch.empty(1, 8, 2, 16)
    for deterministic in (False, True):
        kernel, why = select_kernel("auto", q, q, deterministic=deterministic)
        assert (kernel, why) == (KERNELS["sdpa"], "the first choice")


def test_on_the_cpu_a_head_too_wide_for_flash_is_for_the_reference():
    q = torch.empty(1, 8, 2, 512)
    kernel, why = select_kernel("auto", q, q)
    assert isinstance(kernel, ReferenceKernel)
    assert "cpu_flash takes a head dimension below 512, got 512" in why
    assert "cudnn computes on CUDA devices only, and the tensors are on cpu" in why


@pytest.mark.parametrize("name", ["sdpa", "reference"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_by_name_on_the_cpu(name, deterministic):
    q = torch.empty(1, 8, 2, 16)
    kernel, why = select_kernel(name, q, q, deterministic=deterministic)
    assert (kernel.name, why) == (name, "asked for by name")
    assert kernel.refusal(q, q) is None


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient", "triton"])
def test_a_kernel_for_gpus_says_so_on_the_cpu(name):
    q = torch.empty(1, 8, 2, 16)
    with pytest.raises(
        KernelRefusal, match=f"kernel '{name}' computes on CUDA devices only, and the tensors are on cpu"
    ):
        select_kernel(name, q, q)


@pytest.mark.parametrize("name", ["nobody", "", None, 3, ["sdpa"]])
def test_a_name_that_is_none_is_told_the_others(name):
    q = torch.empty(1, 8, 2, 16)
    with pytest.raises(KernelRefusal, match=r"kernel must be one of auto, sdpa, .*reference; got "):
        select_kernel(name, q, q)


@pytest.mark.parametrize(
    ("capability", "name", "made", "said"),
    [
        (AMPERE, "flash_attn_4", {}, "needs the package flash-attn-4, which is not installed"),
        (TURING, "cudnn", {}, "needs compute capability 8.0, and cuda:0 has 7.5"),
        (TURING, "triton", {}, "needs compute capability 8.0, and cuda:0 has 7.5"),
        (TURING, "efficient", {}, "computes in float32, float16, and the tensors are torch.bfloat16"),
        (HOPPER_GPU, "flash", {"dtype": torch.float32}, "computes in float16, bfloat16, and the tensors are torch.flo"),
        (HOPPER_GPU, "flash", {"d": 257}, "takes a head dimension of at most 256, got 257"),
        (BLACKWELL, "cudnn", {"d": 136}, "takes a head dimension of at most 128, got 136"),
        (HOPPER_GPU, "sdpa", {"dtype": torch.float64}, "has no operation for this: cpu_flash computes on the CPU only"),
    ],
)
def test_refusals_say_why_and_what_to_do(gpu, capability, name, made, said):
    gpu(capability)
    q = tensor(**made)
    with pytest.raises(KernelRefusal) as refused:
        select_kernel(name, q, q)
    assert f"kernel '{name}' {said}" in str(refused.value)
    assert "pass kernel='auto' to let another be chosen" in str(refused.value)


@pytest.mark.parametrize("name", ["sdpa", "cudnn", "flash", "efficient"])
def test_by_name_no_other_bits_than_asked_for(gpu, name):
    gpu(HOPPER_GPU)
    select_kernel(name, tensor(), tensor())
    with pytest.raises(KernelRefusal, match=OTHER_BITS):
        select_kernel(name, tensor(), tensor(), deterministic=True)


def test_who_refuses_anyway_says_that_and_not_that_bits_differ(gpu):
    gpu(HOPPER_GPU)
    with pytest.raises(KernelRefusal, match="computes on the CPU only"):
        select_kernel("sdpa", tensor(torch.float64), tensor(torch.float64), deterministic=True)


@pytest.mark.parametrize("name", ["flash_attn_4", "triton", "reference"])
def test_by_name_the_same_bits_where_there_is_such_a_thing(gpu, name):
    gpu(HOPPER_GPU, packages=[FA4])
    kernel, why = select_kernel(name, tensor(), tensor(), deterministic=True)
    assert (kernel.name, why) == (name, "asked for by name")
    if isinstance(kernel, FusedKernel):
        assert all(operation.is_deterministic for operation in kernel._operations)


def test_auto_says_what_it_took(gpu):
    gpu(HOPPER_GPU, packages=[FA4])
    kernel, why = select_kernel("auto", tensor(), tensor())
    assert kernel.name == "flash_attn_4 or cudnn or flash or efficient or triton"
    assert why == "the fastest of them for every tile, forward and backward"
    gpu(TURING)
    assert select_kernel("auto", tensor(torch.float16), tensor(torch.float16))[0] is KERNELS["sdpa"]
    kernel, why = select_kernel("auto", tensor(torch.float64), tensor(torch.float64))
    assert kernel is KERNELS["reference"]
    assert all(operation.name in why for operation in select.ON_GPU)


def test_auto_asks_once_for_each_kind_of_tensor(gpu, monkeypatch):
    gpu(HOPPER_GPU, packages=[FA4])
    kinds = [
        {"q": tensor(dtype, d), "deterministic": strict}
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
        for d in (64, 200, 512)
        for strict in (False, True)
    ]
    first = [select_kernel("auto", k=kind["q"], **kind) for kind in kinds]
    assert [(kernel.name, why) for kernel, why in first] == [
        (kernel.name, why) for kernel, why in (select._choose(*kind.values()) for kind in kinds)
    ]
    monkeypatch.setattr(flash_attn.Package, "refusal", lambda package: pytest.fail("asked again"))
    assert [select_kernel("auto", k=kind["q"], **kind) for kind in reversed(kinds)] == first[::-1]


def test_auto_with_one_operation_left_has_its_name(gpu):
    gpu(AMPERE)
    kernel, why = select_kernel("auto", tensor(), tensor(), deterministic=True)
    assert kernel.name == "triton"
    assert f"cudnn {OTHER_BITS}" in why


def test_the_two_passes_ask_apart(monkeypatch):
    asked = []
    picked = recipes.picked

    def noted(operations, call, *rest):
        asked.append(call.which)
        return picked(operations, call, *rest)

    monkeypatch.setattr(recipes, "picked", noted)
    forget_choices()
    q, k, v = (torch.randn(1, 8, 2, 8, requires_grad=True) for _ in range(3))
    lr.attention(q, k, v).sum().backward()
    assert asked == ["forward", "backward"]
