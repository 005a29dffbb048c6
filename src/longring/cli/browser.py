"""A page that was written, before whoever asked for it."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path


def show(page: Path) -> str:
    """Open it where there is a screen; a line that says what became of it."""
    address = page.resolve().as_uri()
    if _has_screen() and _opened(address):
        return f"report, opened in your browser: {address}"
    return f"report, to be opened in a browser: {address}"


def _has_screen() -> bool:
    """Browsers without one would take over the terminal."""
    if not sys.stdout.isatty():
        return False
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _opened(address: str) -> bool:
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False
