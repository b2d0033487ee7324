"""Drives headless Chromium over its DevTools pipe, without a driver or a websocket.

DevTools messages are JSON objects terminated by a zero byte, on file descriptors 3 and 4 of the browser.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ANSWER_WITHIN_S = 60.0
READ_BYTES = 1 << 20
# What an evaluation is answered with while the page is being replaced by the next one.
PAGE_CHANGES = ("Inspected target navigated or closed", "Execution context was destroyed", "Cannot find context")


class CommandError(AssertionError):
    """The browser answered a command with an error."""


def find() -> str | None:
    """Path of a Chromium on this machine; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Browser:
    process: subprocess.Popen[bytes]
    to_browser: int
    from_browser: int
    number: int = 0
    buffer: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; other messages are appended to `events`."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        until_s = time.monotonic() + ANSWER_WITHIN_S
        while True:
            answer = self.receive(until_s)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise CommandError(f"{method}: {answer['error']}")
                result = answer["result"]
                assert isinstance(result, dict)
                return result
            self.events.append(answer)

    def receive(self, until_s: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.from_browser], [], [], max(0.0, until_s - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self.from_browser, READ_BYTES)
            assert chunk, "the browser is gone"
            self.buffer += chunk
        line, self.buffer = self.buffer.split(b"\0", 1)
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log"):
            page.send(f"{domain}.enable")
        page.send("Performance.enable", timeDomain="threadTicks")
        page.show_at(width, height, dark=dark)
        page.send("Page.navigate", url=url)
        return page


@dataclass
class Page:
    browser: Browser
    session: str
    target: str

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **parameters)

    def show_at(self, width: int, height: int = 900, *, dark: bool) -> None:
        """Emulate a screen size and a preference for light or dark mode."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def busy_s(self) -> float:
        """CPU seconds of the page's main thread so far."""
        metrics = {metric["name"]: metric["value"] for metric in self.send("Performance.getMetrics")["metrics"]}
        return float(metrics["TaskDuration"])

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, within_s: float = 60.0) -> Any:
        """Evaluate an expression until it is truthy; returns its value. The page may change in the meantime."""
        until_s = time.monotonic() + within_s
        while not (value := self._evaluate_if_settled(script)):
            assert time.monotonic() < until_s, f"timed out: {script}; {self.complaints()}"
            time.sleep(0.02)
        return value

    def follow(self, script: str) -> None:
        """Evaluate an expression that opens another page in this tab."""
        self._evaluate_if_settled(script)

    def _evaluate_if_settled(self, script: str) -> Any:
        """The value of an expression; None if the page was replaced during the evaluation."""
        try:
            return self.evaluate(script)
        except CommandError as error:
            if not any(message in str(error) for message in PAGE_CHANGES):
                raise
            return None

    def click(self, x: float, y: float) -> None:
        """Move the mouse there and click."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def drag(self, first: tuple[float, float], last: tuple[float, float]) -> None:
        for kind, (x, y) in (
            ("mouseMoved", first),
            ("mousePressed", first),
            ("mouseMoved", last),
            ("mouseReleased", last),
        ):
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                buttons=1,
                clickCount=int(kind != "mouseMoved"),
            )

    def press(self, key: str) -> None:
        """Press Enter or Escape."""
        number, text = (13, "\r") if key == "Enter" else (27, "")
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text, windowsVirtualKeyCode=number)

    def complaints(self) -> list[str]:
        """Errors and warnings of the page so far: exceptions, console messages, and blocked requests."""
        found = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            details = event.get("params", {})
            match event["method"]:
                case "Runtime.exceptionThrown":
                    found.append(json.dumps(details["exceptionDetails"])[:2000])
                case "Runtime.consoleAPICalled" if details["type"] in ("error", "warning", "assert"):
                    found.append(json.dumps(details["args"])[:2000])
                case "Log.entryAdded" if details["entry"]["level"] in ("error", "warning"):
                    found.append(json.dumps(details["entry"])[:2000])
        return found

    def picture(self, out: Path, *, whole: bool = False) -> None:
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        out.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **options)["data"]))

    def close(self) -> None:
        self.browser.send("Target.closeTarget", targetId=self.target)


@contextmanager
def started(program: str, scratch: Path) -> Iterator[Browser]:
    """A browser with an empty profile below `scratch`; all its processes are killed afterwards."""
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    options = [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"),
        *("--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={scratch / 'profile'}", "about:blank"),
    ]
    shell = ["bash", "-c", f'exec "$@" 3<&{in_read} 4>&{out_write}', "browser", program, *options]
    with (scratch / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            shell,
            pass_fds=(in_read, out_write),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    os.close(in_read)
    os.close(out_write)
    try:
        yield Browser(process, in_write, out_read)
    finally:
        os.close(in_write)
        os.close(out_read)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
