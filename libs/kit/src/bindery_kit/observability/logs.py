"""Logs: events with fields, as one JSON object per line, or as readable lines on a terminal.

`log = get_logger(__name__)`, then `log.warning("bookie_replaced", ledger_id=7, failed="b2")`: the event is a stable
snake_case name, and its fields have the names that metrics and errors use. Everything goes to stderr, including records
of the standard `logging` (uvicorn, kazoo), whose `extra` become fields.

Fields whose name indicates a secret (`password`, `token`, `authorization`, ...) are masked before they are rendered. Of
bytes only the length and the first bytes are shown.

A value that a client chose can neither forge nor flood a log: long values are cut, and characters that are not
printable (control characters, line and paragraph separators, invisible and bidirectional ones) are escaped.

| output         | unprintable characters | values with `=`, quotation marks or backslashes | exceptions              |
|----------------|------------------------|-------------------------------------------------|-------------------------|
| JSON           | escapes of JSON        | as JSON requires                                | one string              |
| readable lines | the same, in quotes    | in quotes                                       | TRACE_INDENT, each line |

Importing this module is cheap: it loads neither an HTTP stack nor rich.
"""

import json
import logging
import math
import sys
from collections.abc import Mapping, MutableMapping
from itertools import islice
from typing import Any, Final

from bindery_core.errors import BinderyError

from bindery_kit.lean_imports import structlog
from bindery_kit.observability.printable import printable

MASK: Final = "********"
_SECRET_PARTS: Final = (
    "password",
    "passwd",
    "secret",
    "token",
    "authorization",
    "master_key",
    "credential",
    "private_key",
)
_BYTES_SHOWN: Final = 16
_DEPTH_MAX: Final = 4
TEXT_SIZE_MAX: Final = 4096
"""Maximum characters of a text in an event. The middle of a longer one is left out, because the end of a traceback
names the error."""
TRACE_SIZE_MAX: Final = 32 * 1024
"""Maximum characters of a traceback in an event."""
ITEMS_MAX: Final = 100
"""Maximum number of elements of a list or mapping in an event."""
TRACE_INDENT: Final = "  | "
"""Begins each line of a traceback in readable lines, so that a message with line breaks does not look like an event."""
_TRACE: Final = "exception"
"""Field of an event with a traceback."""
_OWN_LOGGERS: Final = "bindery"
"""Standard loggers below this name log events, as structlog does; others log sentences."""
LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""Name of a log level -> its number in `logging`."""
CHATTY: Final = ("kazoo", "uvicorn", "httpx", "httpcore", "asyncio")
"""Loggers of libraries whose events below a warning are dropped."""


def get_logger(name: str | None = None, /, **fields: Any) -> Any:
    """Return a logger with `fields` in each event. Safe at module level, because it is configured at first use."""
    return structlog.get_logger(**({"module": name} if name else {}), **fields)


def configure(*, service: str, level: str = "info", as_json: bool | None = None, **fields: Any) -> None:
    """Configure logging for this process, before the first event. `fields` are part of every event (`bookie_id=...`).

    `as_json=None`: JSON unless stderr is a terminal. `level` is one of LEVELS; ValueError otherwise.
    """
    if level not in LEVELS:
        raise ValueError(f"not a log level: {level!r} (one of {', '.join(LEVELS)})")
    if as_json is None:
        as_json = not sys.stderr.isatty()
    base = {"service": service, **fields}

    def add_base(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        for name, value in base.items():
            event.setdefault(name, value)
        return event

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        add_base,
        structlog.processors.format_exc_info,
    ]
    renderer = _render_json if as_json else _render_line
    structlog.configure(
        processors=[*shared, _mask, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(_STDERR),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(_STDERR)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared], processors=[_drop_record, _mask, renderer]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(LEVELS[level], logging.INFO))
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(max(LEVELS[level], logging.WARNING))


class _Stderr:
    """The current standard error.

    A line that cannot be written, because the reader or the stream is closed, is dropped: an error of logging must not
    end the caller.
    """

    def write(self, text: str) -> int:
        try:
            return sys.stderr.write(text)
        except (OSError, ValueError):
            return 0

    def flush(self) -> None:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            return


_STDERR: Final = _Stderr()


def error_fields(error: BaseException) -> dict[str, Any]:
    """Return the fields that describe `error` in an event: kind and message, or code and facts of a BinderyError."""
    if isinstance(error, BinderyError):
        facts = {f"error_{name}": value for name, value in error.facts.items()}
        return {"error": error.message, "error_code": error.code, **facts}
    return {"error": str(error) or type(error).__name__, "error_kind": type(error).__name__}


def _is_secret(name: str) -> bool:
    lowered = name.lower()
    return any(part in lowered for part in _SECRET_PARTS)


def _mask(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    return {
        name: MASK
        if _is_secret(name) and value
        else _plain(value, depth=0, size_max=TRACE_SIZE_MAX if name == _TRACE else TEXT_SIZE_MAX)
        for name, value in event.items()
    }


def _plain(value: Any, *, depth: int, size_max: int = TEXT_SIZE_MAX) -> Any:
    """Return `value` in types of JSON, with masked secrets inside mappings, and shortened texts, bytes and lists."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # JSON has no infinity
    if isinstance(value, str):
        return _cut(value, size_max)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes {bytes(value[:_BYTES_SHOWN]).hex()}>"
    if depth < _DEPTH_MAX:
        if isinstance(value, Mapping):
            shown = {
                _cut(str(k), size_max): MASK if _is_secret(str(k)) and v else _plain(v, depth=depth + 1)
                for k, v in islice(value.items(), ITEMS_MAX)
            }
            return shown | ({"left_out": len(value) - ITEMS_MAX} if len(value) > ITEMS_MAX else {})
        if isinstance(value, list | tuple | set | frozenset):
            items = [_plain(item, depth=depth + 1) for item in islice(value, ITEMS_MAX)]
            return items + ([f"... ({len(value) - ITEMS_MAX} left out)"] if len(value) > ITEMS_MAX else [])
    return _cut(str(value), size_max)


def _cut(text: str, size_max: int) -> str:
    if len(text) <= size_max:
        return text
    half = size_max // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"


def _shown(value: Any) -> str:
    """Return a value for a readable line: in quotes if it could be taken for several fields otherwise."""
    text = str(value)
    if text.isprintable() and not ("=" in text or '"' in text or "\\" in text):
        return text
    return printable(json.dumps(text, ensure_ascii=False))


def _drop_record(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    record = event.pop("_record", None)
    event.pop("_from_structlog", None)
    if record is not None:
        event.setdefault("module", record.name)
        if not record.name.startswith(_OWN_LOGGERS):
            event["message"] = event.get("event")
            event["event"] = "library_message"
    return event


def _render_json(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    first = {name: event[name] for name in ("time", "level", "event") if name in event}
    return printable(json.dumps({**first, **event}, default=str, ensure_ascii=False))


def _render_line(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    fields = dict(event)
    time = str(fields.pop("time", ""))[11:23]
    level = str(fields.pop("level", "")).upper()
    name = printable(str(fields.pop("event", "")))
    trace = fields.pop(_TRACE, None)
    for noise in ("module", "service"):
        fields.pop(noise, None)
    text = f"{time} {level:<7} {name}  " + " ".join(f"{printable(k)}={_shown(v)}" for k, v in fields.items())
    lines = [TRACE_INDENT + printable(line.expandtabs()) for line in str(trace).split("\n")] if trace else []
    return "\n".join([text.rstrip(), *lines])
