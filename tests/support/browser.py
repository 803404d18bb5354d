"""A headless Chromium driven over its DevTools pipe: no driver, no socket, no package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
PATIENCE = 120.0  # seconds for one answer of a browser on a busy machine


def found() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. messages: what the page logged or threw; requests: the addresses it asked for; failed: in vain."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._buffer, self._count = read, write, b"", 0
        self._session: str | None = None
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.failed: list[str] = []
        self.loads = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._next(until)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser went away")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self.loads += 1
            case "Runtime.consoleAPICalled":
                said = " ".join(str(a.get("value", a.get("description"))) for a in params["args"])
                self.messages.append(f"{params['type']}: {said}")
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.messages.append(f"exception: {details.get('exception', {}).get('description', details['text'])}")
            case "Log.entryAdded":
                self.messages.append(f"{params['entry']['level']}: {params['entry']['text']}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Network.loadingFailed":
                self.failed.append(params["errorText"])

    def open(self, path: Path, ready: str) -> None:
        """Loads a file and waits until the expression `ready` is true."""
        loads = self.loads
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("true", lambda: self.loads > loads)  # what is evaluated brings the events that came before it
        self.wait(ready)

    def wait(self, ready: str, also: Callable[[], bool] = lambda: True) -> None:
        until = time.monotonic() + PATIENCE
        while not (self.run(ready) and also()):
            if time.monotonic() > until:
                raise TimeoutError(f"never true: {ready}; {self.messages}")
            time.sleep(0.05)

    def run(self, expression: str) -> Any:
        """A JavaScript expression's value; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def emulate(self, *, scheme: str = "light", width: int = 1100, height: int = 900, mobile: bool = False) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    def screenshot(self) -> bytes:
        """PNG of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])


@contextlib.contextmanager
def browsing() -> Iterator[Page]:
    """A browser with a fresh profile, and a tab in it. It reads commands from descriptor 3 and writes on 4."""
    program = found()
    assert program is not None
    theirs, to_browser = os.pipe()
    from_browser, ours = os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs, ours)]

    def place() -> None:
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        child = subprocess.Popen(
            [program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place,
        )
        for fd in (theirs, ours, *high):
            os.close(fd)
        try:
            yield Page(from_browser, to_browser)
        finally:
            os.close(to_browser)
            os.close(from_browser)
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
