"""Poll the followed files of a process (`bindery_identity.followed`) and report those that cannot be used.

| event                         | level   | when                                                              |
|-------------------------------|---------|-------------------------------------------------------------------|
| followed_file_read            | info    | the value was replaced                                            |
| followed_file_not_usable      | error   | a file became unusable, or is unusable for another reason         |

The gauge `bindery_followed_file_failures` has a series for each configured file or pair of files: 1 while the files on
disk cannot be used and the last good ones are in force, 0 otherwise.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from bindery_identity.followed import FollowedFiles

from bindery_kit.observability.logs import get_logger
from bindery_kit.observability.metrics_page import Page, labels

POLL_INTERVAL_S: Final = 1.0
"""Seconds between two polls: the longest time until a changed file is in force, plus that of the read."""

PART: Final = "followed_files"
"""Name of the part of a process that polls its files: `life.start_part(PART, files.run())`."""

log = get_logger(__name__)


class FileFollower:
    """The followed files of a process. `render` is a part of its page of metrics."""

    def __init__(self) -> None:
        self._files: list[FollowedFiles[Any]] = []
        self._reported: dict[int, str | None] = {}
        self.on_replaced: Callable[[], None] = lambda: None
        """Called in the event loop after the value of a file was replaced."""
        self._replacements: dict[int, int] = {}

    def follow(self, file: FollowedFiles[Any]) -> None:
        """Poll `file` from now on."""
        if not any(known is file for known in self._files):
            self._files.append(file)
            self._replacements[id(file)] = file.replacements

    def render(self) -> bytes:
        """Return the metric as text for Prometheus; nothing if no file is followed."""
        failures: dict[str, int] = {}
        for file in self._files:
            failures[_name(file)] = max(failures.get(_name(file), 0), int(file.failure is not None))
        if not failures:
            return b""
        page = Page()
        page.add(
            "bindery_followed_file_failures",
            "gauge",
            "1: a configured file has changed and cannot be used, so its last good content is in force.",
            [(labels({"file": name}), value) for name, value in failures.items()],
        )
        return page.render()

    async def run(self) -> None:
        """Poll all files every POLL_INTERVAL_S seconds until cancelled."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.poll()

    async def poll(self) -> None:
        """Poll all files once, in a thread, because a file system may be slow."""
        for file in tuple(self._files):
            await asyncio.to_thread(file.poll)
            failure, replacements = file.failure, file.replacements
            if replacements != self._replacements[id(file)]:  # others may have polled it, too
                self._replacements[id(file)] = replacements
                self.on_replaced()
                log.info("followed_file_read", file=_name(file))
            if failure is not None and failure != self._reported.get(id(file)):
                log.error(
                    "followed_file_not_usable",
                    file=_name(file),
                    error=failure,
                    hint="the last good content is in force; correct the file, it is read again when it changes",
                )
            self._reported[id(file)] = failure


def _name(file: FollowedFiles[Any]) -> str:
    return ",".join(file.paths)
