"""The hashes that make installs by are those of the pinned versions, of all of them, and make uses them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONSTRAINTS = dict(
    line.lower().replace("_", "-").split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)
PINNED_OLDEST = dict(
    re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "tests" / "oldest_transformers.txt").read_text(), re.MULTILINE)
)
FILES = {path.stem: path.read_text() for path in (ROOT / "hashes").glob("*.txt")}
NEVER_ON_CPYTHON = {"httpx2-jsfetch"}  # for Python in a browser
OF_TORCH = re.compile(r"nvidia-(?!cutlass).*|cuda-.*")  # whose wheel names their versions


def entries(text):
    """(name, version, hashes) of each."""
    return [
        (found["name"], found["version"], re.findall(r"--hash=(\S+)", found["hashes"]))
        for found in re.finditer(r"^(?P<name>[\w.-]+)==(?P<version>\S+)(?P<hashes>(?:.*\\\n)+.*)$", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("group", FILES)
def test_every_line_has_sha256_hashes_of_the_pinned_version(group):
    found = entries(FILES[group])
    assert len(found) == FILES[group].count("==") - FILES[group].count(" == '") > 0
    for name, version, hashes in found:
        assert hashes, name
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", each) for each in hashes), name
        if name not in NEVER_ON_CPYTHON and not OF_TORCH.fullmatch(name):
            assert version == (PINNED_OLDEST if group == "oldest_transformers" else CONSTRAINTS)[name]


def test_every_pinned_version_has_hashes():
    hashed = {name for text in FILES.values() for name, _, _ in entries(text)}
    assert CONSTRAINTS.keys() | PINNED_OLDEST.keys() <= hashed


def test_torch_is_not_among_what_is_always_verified():
    """Its build, and so its hash, depends on where pip finds it."""
    assert {group for group, text in FILES.items() for name, _, _ in entries(text) if name == "torch"} == {"torch"}


def test_make_installs_by_them():
    makefile = (ROOT / "Makefile").read_text()
    assert "--require-hashes --no-deps" in makefile
    for group in ("dev", "torch", "frameworks", "sources", "docs", "tools", "oldest_transformers"):
        assert f"--requirement hashes/{group}.txt" in makefile
    for line in re.findall(r"\$\(PIP_INSTALL\) .*", makefile):
        assert "--editable" in line
