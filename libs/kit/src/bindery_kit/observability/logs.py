"""Logs: events with fields, as one JSON object per line, or as readable lines on a terminal.

`log = get_logger(__name__)`, then `log.warning("bookie_replaced", ledger_id=7, failed="b2")`: the event is a stable
snake_case name, and its fields have the names that metrics and errors use. Everything goes to stderr, including records
of the standard `logging` (uvicorn, kazoo), whose `extra` become fields.

Fields whose name indicates a secret (`password`, `token`, `authorization`, ...) are masked before they are rendered. Of
bytes only the length and the first bytes are shown.

Importing this module is cheap: it loads neither an HTTP stack nor rich.
"""

import json
import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

from bindery_core.errors import BinderyError

from bindery_kit.lean_imports import structlog

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
_OWN_LOGGERS: Final = "bindery"
"""Standard loggers below this name log events, as structlog does; others log sentences."""
LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""Name of a log level -> its number in `logging`."""


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
    for chatty in ("kazoo", "uvicorn", "httpx", "httpcore", "asyncio"):
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
    return {name: MASK if _is_secret(name) and value else _plain(value, depth=0) for name, value in event.items()}


def _plain(value: Any, *, depth: int) -> Any:
    """Return `value` in types of JSON, with masked secrets inside mappings, and shortened bytes."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes {bytes(value[:_BYTES_SHOWN]).hex()}>"
    if depth < _DEPTH_MAX:
        if isinstance(value, Mapping):
            return {str(k): MASK if _is_secret(str(k)) and v else _plain(v, depth=depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [_plain(item, depth=depth + 1) for item in value]
    return str(value)


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
    return json.dumps({**first, **event}, default=str, ensure_ascii=False)


def _render_line(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    fields = dict(event)
    time = str(fields.pop("time", ""))[11:23]
    level = str(fields.pop("level", "")).upper()
    name = fields.pop("event", "")
    trace = fields.pop("exception", None)
    for noise in ("module", "service"):
        fields.pop(noise, None)
    text = f"{time} {level:<7} {name}  " + " ".join(f"{k}={v}" for k, v in fields.items())
    return text.rstrip() + (f"\n{trace}" if trace else "")
