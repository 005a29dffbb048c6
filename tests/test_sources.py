"""The hash of the engine's sources: what moves it, what does not, and that nothing it leaves out is computed with."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import longring
from longring.sources import OUTSIDE, ROOT_MODULES, SUFFIXES, engine_files, sources

SOURCE = Path(longring.__file__).parent
ENGINE = set(engine_files(SOURCE))


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(SOURCE, tmp_path / "longring", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("kernels/triton/parts.py", "kernels"),
        ("transport/process_group.py", "transport"),
        ("testing/oracle.py", "testing"),
        ("plan/hardware.toml", "plan"),
        ("autograd.py", ROOT_MODULES),
    ],
)
def test_a_change_in_the_engine_moves_it_and_names_the_package(copy, name, package):
    before = sources(copy)
    with (copy / name).open("a") as file:
        file.write("\n# more\n")
    after = sources(copy)
    assert after["engine"] != before["engine"]
    moved = {each for each, digest in after["packages"].items() if digest != before["packages"][each]}
    assert moved == {package}


@pytest.mark.parametrize("name", ["kernels/new.py", "engine/new.py", "new.py"])
def test_a_new_file_moves_it_wherever_it_is(copy, name):
    before = sources(copy)
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text("")
    assert sources(copy)["engine"] != before["engine"]


@pytest.mark.parametrize("name", ["cli/plan.py", "bench/records.py", "train/run.py", "nn/layers.py", "plan/advice.py"])
def test_what_stands_on_top_of_it_does_not(copy, name):
    before = sources(copy)
    with (copy / name).open("a") as file:
        file.write("\n# more\n")
    assert sources(copy) == before


def test_a_name_is_not_taken_for_content(copy):
    before = sources(copy)
    (copy / "kernels/views.py").rename(copy / "kernels/viewz.py")
    assert sources(copy)["engine"] != before["engine"]


def test_neither_place_nor_line_endings_nor_caches_play_a_part(copy):
    before = sources(SOURCE)
    for name in ENGINE:
        text = (copy / name).read_bytes()
        (copy / name).write_bytes(text.replace(b"\n", b"\r\n"))
    (copy / "kernels" / "__pycache__").mkdir()
    (copy / "kernels" / "__pycache__" / "fused.pyc").write_bytes(b"compiled")
    assert sources(copy) == before


def test_it_needs_no_git_and_no_torch(copy):
    code = f"import sys; sys.path.insert(0, {str(copy.parent)!r}); from longring.sources import sources\n"
    code += "print(sources()['engine'], 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env={"PATH": ""}, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [sources(SOURCE)["engine"], "False"]


def test_every_kind_of_file_in_the_engine_counts():
    files = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    inside = [path for path in files if path.relative_to(SOURCE).parts[0] not in OUTSIDE]
    assert {path.suffix for path in inside if path.name != "py.typed"} == SUFFIXES


# ------------------------------------------------------------------------------------------------------- completeness


def modules() -> dict[str, str]:
    """Files by the names that they are imported by."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        inside = path.relative_to(SOURCE)
        parts = inside.parent.parts if path.name == "__init__.py" else inside.with_suffix("").parts
        found[".".join(("longring", *parts))] = inside.as_posix()
    return found


MODULES = modules()


def imported(name: str) -> set[str]:
    """Files that a file imports, wherever in it, and the packages they are in."""
    package = ("longring", *Path(name).parent.parts)
    found: set[str] = set()
    for node in ast.walk(ast.parse((SOURCE / name).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    found |= {each.rpartition(".")[0] for each in found}
    return {MODULES[each] for each in found if each in MODULES}


def test_what_the_engine_imports_is_part_of_it():
    """Else it could change under a receipt that still reads as fresh. The root has names only, of the whole library."""
    computing = sorted(name for name in ENGINE if name.endswith(".py") and name != "__init__.py")
    missing = {name: sorted(imported(name) - ENGINE) for name in computing}
    assert {name: outside for name, outside in missing.items() if outside} == {}
    assert "kernels/fused.py" in imported("kernels/select.py")
    assert len(ENGINE) > 80
