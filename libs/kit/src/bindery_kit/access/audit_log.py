"""AuditLog: lines of JSON about administrative changes and refused requests, written before the answer is sent.

One line is one object. `event` is one of:

| event              | written                                  | members beside time, service and event              |
|--------------------|------------------------------------------|-----------------------------------------------------|
| `change_started`   | before the change is made                | `change`, the request                               |
| `change_finished`  | before its answer is sent, or when the   | `change`, the request, `status` (null: no answer    |
|                    | request ends without one                 | was sent, the change may have been made), `code`    |
| `denied`           | before the answer 401 or 403 is sent     | the request, `status`, `code`                       |
| `denials_left_out` | at the end of a minute with more refused | `client` or `others`, `count`                       |
|                    | requests than `denial_counts` allows     |                                                     |

A change that is refused because its first line was not written in time has a `change_finished` with status 503 and the
code `audit_log_unavailable` as soon as the file takes lines, because `change_started` may be in the file nevertheless.
If the client goes while that line is written, `change_finished` has no status and the code `not_begun`. In both cases,
nothing was changed.

`change` pairs the two lines of a change: it is unique in all logs of the cluster, except by accident. The request:

| member                  | value                                                                                    |
|-------------------------|------------------------------------------------------------------------------------------|
| `request_id`            | as in the answer's X-Request-Id; null if it has none                                     |
| `role`, `original_role` | of the client, and of the client on whose behalf it called; null if unknown              |
| `method`, `path`        | as they were sent, without the query                                                     |
| `operation`             | id of the operation; null if the request was refused before it was known                 |
| `resource`              | object: the parts of the path, and ids in the query, for example `tenant`, `ledger_id`   |
| `client`                | address; null if unknown                                                                 |
| `is_proxied`            | whether another broker passed the request on, which has a line of its own                |

`code` is that of the error in the answer; null if there is none, or if the request did not match the schema of its
operation. `time` is UTC with milliseconds. Bodies, headers with credentials and queries are never written. Values have
at most VALUE_SIZE_MAX characters and contain only ASCII, with JSON's escapes, so that nothing that a client sends can
forge a line.

Lines are written by one thread, all that wait in one write (and one fsync). If that fails, each writer gets
AuditLogUnavailable. Denials whose line cannot be written are refused all the same, and counted as failures.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251 - the file may block, the event loop must not
from datetime import UTC, datetime
from typing import Any, Final

from bindery_core.errors import TryAgain

from bindery_kit.access.audit_file import AuditFile
from bindery_kit.access.denial_counts import OTHERS, DenialCounts
from bindery_kit.observability.logs import error_fields
from bindery_kit.observability.metrics_page import Page, labels
from bindery_kit.observability.quiet_log import QuietLog

VALUE_SIZE_MAX: Final = 512
"""Maximum characters of one value."""
RESOURCE_PARTS_MAX: Final = 16
"""Maximum number of members of `resource`."""
WAITING_MAX: Final = 10_000
"""Maximum number of lines that wait for the file; further ones fail at once."""
WRITE_TIMEOUT_S: Final = 5.0
"""Seconds after which a line counts as not written. It may be written later."""
EVENTS: Final = ("change_started", "change_finished", "denied", "denials_left_out")


class AuditLogUnavailable(TryAgain):
    """The line about a change cannot be written, so that the change is not made."""

    code = "audit_log_unavailable"


class AuditLog:
    """`refuses`: whether a change whose line cannot be written is refused. `clock`: monotonic seconds."""

    def __init__(
        self,
        file: AuditFile,
        *,
        service: str,
        refuses: bool,
        clock: Callable[[], float],
        wall_clock_ms: Callable[[], int],
    ) -> None:
        self.refuses = refuses
        self._file = file
        self._service = service
        self._clock = clock
        self._wall_clock_ms = wall_clock_ms
        self._log = QuietLog(__name__, clock=clock)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit-log")
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._denials = DenialCounts()
        self._window_timer: asyncio.TimerHandle | None = None
        self._counting: set[asyncio.Task[None]] = set()
        self._prefix = f"{wall_clock_ms():x}-{id(self) & 0xFFFFFF:x}"
        self._changes = 0
        self.lines = dict.fromkeys(EVENTS, 0)
        """Lines that were written, by event."""
        self.failures = 0
        """Lines that could not be written in time."""
        self.left_out = 0
        """Denials without a line of their own."""

    def next_change(self) -> str:
        """Return the id of a new change."""
        self._changes += 1
        return f"{self._prefix}-{self._changes}"

    async def write(self, event: str, fields: Mapping[str, Any]) -> None:
        """Return when the line is written. Raises AuditLogUnavailable."""
        if len(self._waiting) >= WAITING_MAX:
            raise self._failed(f"{WAITING_MAX} lines wait for the file")
        written = self._put(event, fields)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await written
        except TimeoutError:
            raise self._failed(f"the file took no line for {WRITE_TIMEOUT_S:g} s") from None
        except OSError as error:
            self._log.error("audit_log_not_written", path=self._file.path, **error_fields(error))
            raise self._failed(error.strerror or str(error)) from error
        self.lines[event] += 1

    def revoke(self, fields: Mapping[str, Any]) -> None:
        """Write `change_finished` for a change that is not made because the write of its `change_started` failed, or
        was abandoned: that line may be in the file, or follow when the disk works again.

        Returns at once. The line is tried once, behind the first one; a failure is not counted again.
        """

        def end(written: asyncio.Future[None]) -> None:
            if not written.cancelled() and written.exception() is None:
                self.lines["change_finished"] += 1

        if len(self._waiting) < WAITING_MAX:
            self._put("change_finished", fields).add_done_callback(end)

    async def deny(self, address: str, fields: Mapping[str, Any]) -> None:
        """Write or count a denial. It never fails: failures are logged and counted. `address`: see `DenialCounts`."""
        now_s = self._clock()
        ends_s = self._denials.ends_s
        if ends_s is not None and now_s >= ends_s:
            self._end_window()
        if not self._denials.admit(address, now_s=now_s):
            self.left_out += 1
            self._watch_window()
            return
        try:
            await self.write("denied", fields)
        except AuditLogUnavailable as error:
            self._log.error("denial_not_recorded", **error_fields(error))

    async def close(self) -> None:
        """Write what waits, and the counts of denials, then close the file. Idempotent."""
        self._end_window()
        while self._counting or self._writing is not None:
            tasks = [*self._counting, *([self._writing] if self._writing is not None else ())]
            done, _ = await asyncio.wait(tasks, timeout=WRITE_TIMEOUT_S)
            if not done:
                break
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._writing is None:
            self._file.close()

    def render(self) -> bytes:
        """Return the metrics as text for Prometheus."""
        page = Page()
        page.add(
            "bindery_audit_log_lines_total",
            "counter",
            "Lines of the audit log.",
            [(labels({"event": event}), count) for event, count in self.lines.items()],
        )
        for name, help, value in (
            ("bindery_audit_log_failures_total", "Lines of the audit log that were not written.", self.failures),
            ("bindery_audit_log_denials_left_out_total", "Denials that are only counted.", self.left_out),
        ):
            page.add(name, "counter", help, [("", value)])
        return page.render()

    # --- lines ----------------------------------------------------------------------------------------------------

    def _line(self, event: str, fields: Mapping[str, Any]) -> bytes:
        at = datetime.fromtimestamp(self._wall_clock_ms() / 1000, UTC).isoformat(timespec="milliseconds")
        line = {"time": at.removesuffix("+00:00") + "Z", "service": self._service, "event": event}
        line |= {name: _bounded(value) for name, value in fields.items()}
        return json.dumps(line, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"

    def _put(self, event: str, fields: Mapping[str, Any]) -> asyncio.Future[None]:
        """Return a future that is done when the line is written."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._line(event, fields), written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all(), name="audit-log")
        return written

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                failure: Exception | None = None
                try:
                    lines = b"".join([line for line, _ in waiting])
                    await loop.run_in_executor(self._thread, self._file.append, lines)
                except (OSError, RuntimeError) as error:  # RuntimeError: closed
                    failure = error if isinstance(error, OSError) else OSError(str(error))
                for _, written in waiting:
                    if written.done():
                        continue
                    if failure is None:
                        written.set_result(None)
                    else:
                        written.set_exception(failure)
        finally:
            self._writing = None

    def _failed(self, reason: str) -> AuditLogUnavailable:
        self.failures += 1
        return AuditLogUnavailable(
            f"the audit log cannot be written: {reason}. Nothing was changed. Repair the file or disk of the setting "
            "audit_log.file; audit_log.on_failure=continue allows changes without it"
        )

    # --- denials --------------------------------------------------------------------------------------------------

    def _watch_window(self) -> None:
        """End the window in time, although no other denial may come."""
        ends_s = self._denials.ends_s
        if self._window_timer is None and ends_s is not None:
            delay_s = max(0.0, ends_s - self._clock())
            self._window_timer = asyncio.get_running_loop().call_later(delay_s, self._end_window)

    def _end_window(self) -> None:
        if self._window_timer is not None:
            self._window_timer.cancel()
            self._window_timer = None
        counts = self._denials.end()
        if counts:
            task = asyncio.create_task(self._write_counts(counts))
            self._counting.add(task)
            task.add_done_callback(self._counting.discard)

    async def _write_counts(self, counts: list[tuple[str, int]]) -> None:
        for address, count in counts:
            whose = {"others": True} if address == OTHERS else {"client": address}
            try:
                await self.write("denials_left_out", {**whose, "count": count})
            except AuditLogUnavailable as error:
                self._log.error("denial_not_recorded", **error_fields(error))
                return


def _bounded(value: Any) -> Any:
    """Return `value` with all its text cut to VALUE_SIZE_MAX characters."""
    if isinstance(value, str):
        return value if len(value) <= VALUE_SIZE_MAX else value[: VALUE_SIZE_MAX - 3] + "..."
    if isinstance(value, Mapping):
        return {_bounded(str(name)): _bounded(one) for name, one in list(value.items())[:RESOURCE_PARTS_MAX]}
    return value if value is None or isinstance(value, bool | int | float) else _bounded(str(value))
