"""The site is whole before anybody builds it: pages have a place, links lead somewhere, pictures are current."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import longring
import longring.models
import longring.nn
import longring.testing
from documents import ROOT, name_of, pages

DOCS = ROOT / "docs"
MADE = {"changelog.md", "contributing.md", "security.md"}  # out of files of the repository, when the site is built
LINK = re.compile(r"(!?)\[(?P<words>[^\]]*)\]\((?P<path>(?![a-z]+:|#)[^)\s#]+)(?:#[^)\s]*)?\)")
FENCES = re.compile(r"^ *```.*?^ *``` *$", flags=re.DOTALL | re.MULTILINE)

CONFIG = (ROOT / "mkdocs.yml").read_text()


def links(page: Path) -> list[re.Match[str]]:
    return list(LINK.finditer(FENCES.sub("", page.read_text())))


def test_every_page_is_in_the_navigation_once():
    _, _, nav = CONFIG.partition("\nnav:\n")
    named = re.findall(r"([\w/]+\.md)$", nav, flags=re.MULTILINE)
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert sorted(named) == sorted(there | MADE)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_lead_to_files_that_there_are(page):
    missing = [found["path"] for found in links(page) if not (page.parent / found["path"]).exists()]
    assert [path for path in missing if Path(path).name not in MADE] == []


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_picture_says_in_words_what_it_shows(page):
    for found in links(page):
        if found[1]:
            assert len(found["words"].split()) >= 4, found[0]


def test_the_reference_has_every_public_name():
    shown = set(
        re.findall(r"^::: ([\w.]+)$", "".join(page.read_text() for page in DOCS.glob("api/*.md")), re.MULTILINE)
    )
    homes = {f"longring.{home}.{name}" for name, home in longring._HOMES.items()}
    assert {name for name in homes if name not in shown and name.rpartition(".")[0] not in shown} == set()
    for room in (longring.nn, longring.models, longring.testing):
        assert {name for name in room.__all__ if not any(one.endswith(f".{name}") for one in shown)} == set()


def test_the_site_loads_nothing_from_elsewhere():
    assert "font: false" in CONFIG
    addresses = set(re.findall(r"https?://\S+", CONFIG))
    assert not addresses


# ---------------------------------------------------------------------------------------------------- pictures


def drawings() -> dict[Path, str]:
    spec = importlib.util.spec_from_file_location("draw_concepts", DOCS / "draw_concepts.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.drawings()


def test_the_pictures_of_concepts_are_current():
    made = drawings()
    assert {path.name for path in made} == {path.name for path in (DOCS / "images" / "concepts").iterdir()}
    for path, text in made.items():
        assert path.read_text() == text, "run python docs/draw_concepts.py"
        (title,) = ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}title")
        assert title.text
