"""A real browser, driven over a pipe with the DevTools protocol: as much of it as these tests need."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
from itertools import count
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Self

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


def browser_program() -> str:
    """Chromium, installed by the system's package manager if there is none and we may. Else these tests fail."""
    found = _find()
    if found is None and shutil.which("apt-get") is not None and os.geteuid() == 0:
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], check=True, env=env, stdout=subprocess.DEVNULL)
        subprocess.run(["apt-get", "install", "-qqy", "chromium"], check=True, env=env, stdout=subprocess.DEVNULL)
        found = _find()
    assert found is not None, "there is no Chromium here: install the package `chromium` of your system"
    return found


def _find() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Browser:
    """Blocking: call it from a thread."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="hangup-browser-")
        down, self._write = os.pipe()
        self._read, up = os.pipe()

        def place() -> None:  # in the child: the protocol is spoken on 3 and 4, which may be in use here
            os.dup2(down, 1000)
            os.dup2(up, 1001)
            os.dup2(1000, 3)
            os.dup2(1001, 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(down)
        os.close(up)
        self._numbers = count(1)
        self._answers: dict[int, Queue[Any]] = {}
        self.events: Queue[Any] = Queue()
        self._reader = threading.Thread(target=self._keep_reading, daemon=True)
        self._reader.start()
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = Queue()
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session := getattr(self, "_session", None):
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        try:
            said = answer.get(timeout=60)
        except Empty:
            raise TimeoutError(f"the browser did not answer {method}") from None
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']}")
        return said["result"]

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 700,
        )

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; of what a promise promises, if it is one."""
        said = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise RuntimeError(str(said["exceptionDetails"]))
        return said["result"].get("value")

    def wait_for(self, expression: str, timeout: float = 30) -> Any:
        """Wait in the page until ``expression`` is truthy."""
        js = (
            f"new Promise((yes, no) => {{ const end = Date.now() + {timeout * 1000}; const look = () => {{ let v; "
            f"try {{ v = ({expression}) }} catch (e) {{ v = null }}; if (v) yes(v); "
            f"else if (Date.now() > end) no(new Error('never: ' + document.body.innerText)); "
            f"else setTimeout(look, 50) }}; look() }})"
        )
        return self.evaluate(js)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[Any]:
        """Errors of scripts, and what the page's policy has blocked."""
        found = []
        while not self.events.empty():
            event = self.events.get()
            if event["method"] == "Runtime.exceptionThrown":
                found.append(event["params"])
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"])
            elif event["method"] == "Page.javascriptDialogOpening":
                found.append(event["params"])
        return found

    def _keep_reading(self) -> None:
        rest = b""
        while True:
            try:
                part = os.read(self._read, 65536)
            except OSError:
                return
            if not part:
                return
            *whole, rest = (rest + part).split(b"\0")
            for message in map(json.loads, whole):
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                else:
                    self.events.put(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._session = None
            self.send("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._reader.join(10)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)
