"""What the site needs besides its pages: files of the repository that pages link to become pages of it, too.

Pages link to sources, tests and examples by their paths, so that links work wherever the repository is read. The site
has to be whole by itself: it gets a page for every such file, and for the changelog, the contributors' guide and what
is said of security.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, relpath
from typing import Any

from mkdocs.structure.files import File, Files

log = logging.getLogger("mkdocs.hooks.site")

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PLACES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
OURS = {place: ROOT / name for name, place in PLACES.items() if name != "README.md"}
LANGUAGES = {".py": "python", ".md": "markdown", ".toml": "toml", ".json": "json", ".sh": "sh"}

LINK = re.compile(r"(?P<begin>\]\()(?P<path>(?![a-z]+:|#|/)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
LOADS = re.compile(r'<(?:script|img|iframe|source|link|video|audio)\b[^>]*\b(?:src|href)="((?:https?:)?//[^"]*)"', re.I)


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to outside of docs/."""
    for place, path in OURS.items():
        files.append(File.generated(config, place, content=path.read_text()))
    wanted = {target for page in files.documentation_pages() for target in _outside(page)}
    for target in sorted(wanted):
        files.append(File.generated(config, _place(target), content=_shown(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to where the site has what they mean."""

    def led(found: re.Match[str]) -> str:
        target = _target(page.file, found["path"])
        if target is None:
            return found[0]
        there = relpath(_place(target), dirname(page.file.src_uri))
        return f"{found['begin']}{there}{found['anchor'] or ''})"

    return LINK.sub(led, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The site is read without a network: a page that would load something from elsewhere is an error."""
    for address in LOADS.findall(output):
        log.warning("%s would load %s", page.file.src_uri, address)
    return output


def _outside(page: File) -> Iterator[Path]:
    """Files and folders of the repository that a page links to and the site does not have."""
    for found in LINK.finditer(page.content_string):
        target = _target(page, found["path"])
        if target is not None and _place(target).startswith("repository/"):
            yield target


def _target(page: File, path: str) -> Path | None:
    """What a link of the page means; None for what is not there or not ours, of which MkDocs complains by itself."""
    home = OURS.get(page.src_uri, DOCS / page.src_uri).parent
    target = (home / path).resolve()
    return target if target.exists() and target.is_relative_to(ROOT) else None


def _place(target: Path) -> str:
    """Where the site has a file or folder of the repository."""
    if target.is_relative_to(DOCS) and target.is_file():
        return target.relative_to(DOCS).as_posix()
    path = target.relative_to(ROOT).as_posix()
    return PLACES.get(path, f"repository/{path}.md")


def _shown(target: Path) -> str:
    """A page with the text of a file, or the names in a folder."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {target.relative_to(ROOT).as_posix()}\n\n"
    if target.is_dir():
        return head + "".join(f"- `{one.name}`\n" for one in sorted(target.iterdir()) if one.suffix in LANGUAGES)
    return head + f"`````{LANGUAGES.get(target.suffix, 'text')}\n{target.read_text()}`````\n"
