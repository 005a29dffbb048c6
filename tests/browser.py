"""A headless Chromium, driven over the pipe that its developer tools speak: no package, no port, no network."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

PATIENCE = 40.0  # seconds for one answer: a browser that starts on a busy machine takes a few
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",  # containers have little of it
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--metrics-recording-only",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


def found() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


needs_browser = pytest.mark.skipif(found() is None, reason="no Chromium here: apt-get install chromium")


class Browser:
    """One process for many pages."""

    def __enter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(prefix="longring-browser-", ignore_cleanup_errors=True)
        to_browser, from_browser = os.pipe(), os.pipe()
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser[0], from_browser[1])]
        for end in (to_browser[0], from_browser[1]):
            os.close(end)
        self._in, self._out = to_browser[1], from_browser[0]
        flags = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "about:blank"]
        script = f'exec "$0" "$@" 3<&{theirs[0]} 4>&{theirs[1]}'  # the browser reads at 3 and writes at 4
        self._process = subprocess.Popen(
            ["bash", "-c", script, str(found()), *flags],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )
        for end in theirs:
            os.close(end)
        self._number, self._unread = 0, b""
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.ask("Browser.close")
            self._process.wait(PATIENCE)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        for end in (self._in, self._out):
            os.close(end)
        self._folder.cleanup()

    def ask(self, method: str, session: str | None = None, **words: Any) -> dict[str, Any]:
        """One question and its answer; what happens meanwhile is kept in `events`."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": words, **({"sessionId": session} if session else {})}
        os.write(self._in, json.dumps(asked).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            heard = self._hear(until)
            if heard.get("id") == self._number:
                assert "error" not in heard, f"{method}: {heard['error']}"
                return heard["result"]
            self.events.append(heard)

    def wait_for(self, method: str, session: str) -> None:
        until = time.monotonic() + PATIENCE
        while not any(e.get("method") == method and e.get("sessionId") == session for e in self.events):
            self.events.append(self._hear(until))

    def _hear(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._out], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser said nothing for {PATIENCE:.0f} s"
            more = os.read(self._out, 1 << 20)
            assert more, "the browser has gone"
            self._unread += more
        told, _, self._unread = self._unread.partition(b"\0")
        return json.loads(told)

    def open(
        self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False, scripts: bool = True
    ) -> Page:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            page.ask(f"{domain}.enable")
        page.resize(width, height)
        page.show_as(dark=dark)
        page.ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        page.ask("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("Page.loadEventFired", session)
        return page


class Page:
    """One page that has loaded, and everything it said and asked for."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session

    def ask(self, method: str, **words: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **words)

    def close(self) -> None:
        self._browser.ask("Target.closeTarget", targetId=self._target)

    def resize(self, width: int, height: int) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def show_as(self, *, dark: bool = False, media: str = "") -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)

    def evaluate(self, script: str) -> Any:
        told = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        words = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 if shift else 0}
        text = {"Enter": "\r", " ": " "}.get(key)
        self.ask("Input.dispatchKeyEvent", type="keyDown", **words, **({"text": text} if text else {}))
        self.ask("Input.dispatchKeyEvent", type="keyUp", **words)

    def accessible(self) -> list[dict[str, Any]]:
        """What a screen reader is told: (role, name) of every node it does not pass over."""
        nodes = self.ask("Accessibility.getFullAXTree")["nodes"]
        return [
            {"role": node["role"]["value"], "name": node.get("name", {}).get("value", "")}
            for node in nodes
            if not node.get("ignored") and "role" in node
        ]

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        told = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(told["data"]))
        return path

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _heard(self, *methods: str) -> list[dict[str, Any]]:
        ours = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"] for event in ours if event["method"] in methods]

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and what the browser logs of its own."""
        said = [str(call["args"]) for call in self._heard("Runtime.consoleAPICalled")]
        thrown = [str(error["exceptionDetails"]) for error in self._heard("Runtime.exceptionThrown")]
        logged = [entry["entry"]["text"] for entry in self._heard("Log.entryAdded")]
        return said + thrown + logged

    @property
    def requests(self) -> list[str]:
        return [asked["request"]["url"] for asked in self._heard("Network.requestWillBeSent")]
