"""`import longring` is light: no torch until a name needs it, and never an optional package."""

import subprocess
import sys

import longring

FRAMEWORKS = ("accelerate", "deepspeed", "fairscale", "lightning", "transformers")
OPTIONAL = ("matplotlib", "typer", "rich", "triton", "hypothesis", *FRAMEWORKS)


def loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    return set(done.stdout.split())


def test_importing_longring_imports_no_torch():
    modules = loaded_after("import longring, longring.plan.traffic, longring.plan.choose; longring.Dense")
    assert "torch" not in modules
    assert not modules & set(OPTIONAL)


def test_attention_needs_no_optional_package():
    modules = loaded_after("import longring as lr; lr.attention; lr.simulate; lr.Sharding; lr.nn; lr.models")
    torch_alone = loaded_after("import torch, torch.utils._python_dispatch, torch.distributed, torch.nn.functional")
    assert not (modules - torch_alone) & set(OPTIONAL)


def test_every_public_name_resolves():
    for name in longring._HOMES:
        assert getattr(longring, name).__name__ == name
    for room in longring._ROOMS:
        assert getattr(longring, room).__name__ == f"longring.{room}"
    assert {*longring._HOMES, *longring._ROOMS} <= set(dir(longring))
