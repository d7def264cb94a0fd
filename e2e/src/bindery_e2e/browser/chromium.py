"""Chromium: a headless browser, driven over its DevTools pipe.

    with Chromium(proxy="socks5://127.0.0.1:1080") as browser:
        tab = browser.open("http://127.0.0.1:8090/")
        title = tab.evaluate("document.title")

Messages are JSON objects, each with a zero byte after it, over descriptors 3 (commands) and 4 (responses and events).
Source: Chrome DevTools Protocol.
"""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

PROGRAM: Final = "BINDERY_CHROMIUM"
"""Environment variable with the path of the browser; otherwise it is searched on PATH."""
PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
COMMAND_TIMEOUT_S: Final = 30.0
END_TIMEOUT_S: Final = 10.0
OWN_PROTECTION: Final = (
    "LocalNetworkAccessChecks",
    "LocalNetworkAccessChecksWebSockets",
    "LocalNetworkAccessChecksWRTC",
    "LocalNetworkAccessForNavigations",
    "LocalNetworkAccessForSubframeNavigations",
    "BlockInsecurePrivateNetworkRequests",
    "PrivateNetworkAccessSendPreflights",
    "PrivateNetworkAccessForNavigations",
    "PrivateNetworkAccessForWorkers",
    "HttpsUpgrades",
    "HttpsFirstBalancedModeAutoEnable",
)
"""Features of newer versions that keep pages away from loopback. They are switched off, because other browsers do not
have them, and they would hide what the services do."""
LOOPBACK_ONLY: Final = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
OPTIONS: Final = (
    "--headless=new",
    "--no-sandbox",  # it needs privileges that a container does not have
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-popup-blocking",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--disable-extensions",
    "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding",
    "--no-first-run",
    "--no-default-browser-check",
    "--password-store=basic",
    "--mute-audio",
)


class BrowserError(Exception):
    """The browser is missing, has ended, or refused a command."""


def chromium_program() -> str:
    """Return the path of the browser. Raises BrowserError with instructions if it is missing."""
    found = os.environ.get(PROGRAM) or next(filter(None, map(shutil.which, PROGRAMS)), None)
    if not found:
        raise BrowserError(
            "no browser: install Chromium (apt-get install chromium), or name one in the environment variable "
            f"{PROGRAM}"
        )
    return found


class Tab:
    """One page of the browser. `console`: its messages, also those of the browser about it. `requests`: URLs that it
    requested."""

    def __init__(self, browser: "Chromium", session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self.target = target
        self.console: list[str] = []
        self.requests: list[str] = []
        self.loads = 0
        """Number of documents that were loaded completely."""
        browser._listeners[session] = self._on_event
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol. Raises BrowserError."""
        return self._browser.command(method, session=self._session, **parameters)

    def navigate(self, url: str) -> None:
        """Open `url` as if it had been typed, and wait until it is loaded. Raises BrowserError if it cannot be."""
        before = self.loads
        answer = self.command("Page.navigate", url=url)
        if answer.get("errorText"):
            raise BrowserError(f"{url}: {answer['errorText']}")
        self.wait(lambda: self.loads > before, f"{url} is loaded")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise. Raises BrowserError for its exceptions."""
        answer = self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, is_true: Callable[[], object], what: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Wait until `is_true()`. Raises BrowserError after `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() > until:
                raise BrowserError(f"not true after {timeout_s:g} s: {what}; console: {self.console[-5:]}")
            time.sleep(0.02)

    def close(self) -> None:
        self._browser.command("Target.closeTarget", targetId=self.target)

    def _on_event(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Log.entryAdded":
            self.console.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(one.get("value", "")) for one in parameters["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loads += 1


class Chromium:
    """`proxy`: URL of a proxy for all hosts but loopback. Without one, the browser reaches loopback only."""

    def __init__(self, *, proxy: str | None = None) -> None:
        self._program = chromium_program()
        self._proxy = proxy
        self._directory = Path(tempfile.mkdtemp(prefix="bindery-browser-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._is_over = False
        self._listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}

    def start(self) -> None:
        commands_read, self._commands = _pipe()
        self._messages, messages_write = _pipe()
        arguments = [
            *(self._program, *OPTIONS),
            f"--user-data-dir={self._directory / 'profile'}",
            f"--disable-features={','.join(OWN_PROTECTION)}",
            f"--proxy-server={self._proxy}" if self._proxy else LOOPBACK_ONLY,
            "about:blank",
        ]
        script = f'exec "$@" 3<&{commands_read} 4>&{messages_write}'
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["/bin/bash", "-c", script, "browser", *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(commands_read, messages_write),
                start_new_session=True,
            )  # fmt: skip
        os.close(commands_read)
        os.close(messages_write)
        threading.Thread(target=self._read, daemon=True).start()
        self.command("Target.setDiscoverTargets", discover=True)

    def open(self, url: str | None = None) -> Tab:
        """Return a new tab, in which `url` was opened without waiting for it."""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session, target)
        if url is not None:
            tab.command("Page.navigate", url=url)
        return tab

    def version(self) -> str:
        return str(self.command("Browser.getVersion")["product"])

    def command(self, method: str, *, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result. Raises BrowserError."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        with contextlib.suppress(BrokenPipeError):  # reported below
            os.write(self._commands, json.dumps(message).encode() + b"\0")
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._answers or self._is_over, COMMAND_TIMEOUT_S):
                raise BrowserError(f"{method}: no response within {COMMAND_TIMEOUT_S:g} s")
            if number not in self._answers:
                raise BrowserError(f"the browser has ended; its last lines:\n{self.log()[-2000:]}")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")

    def _read(self) -> None:
        rest = b""
        while piece := os.read(self._messages, 1 << 16):
            *messages, rest = (rest + piece).split(b"\0")
            for text in messages:
                message = json.loads(text)
                if "id" in message:
                    with self._changed:
                        self._answers[message["id"]] = message
                        self._changed.notify_all()
                elif (listener := self._listeners.get(message.get("sessionId", ""))) is not None:
                    listener(message["method"], message["params"])
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the browser and remove its files."""
        if self._process is not None:
            with contextlib.suppress(BrowserError):
                self.command("Browser.close")
            try:
                self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            os.close(self._commands)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pipe() -> tuple[int, int]:
    """Return a pipe whose descriptors are none of 3 and 4, which the browser gets."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
