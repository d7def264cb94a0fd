"""Errors in the answers of other brokers, as the errors that they stand for."""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import msgspec
from bindery_core.errors import BinderyError, Conflict, LostOwnership, OutcomeUnknown, TryAgain

_BY_STATUS: Final[dict[int, type[BinderyError]]] = {429: TryAgain, 503: TryAgain}


class _Problem(msgspec.Struct):
    """The used members of a problem."""

    code: str = ""
    detail: str = ""
    facts: dict[str, Any] = {}


def remote_error(status: int, body: bytes) -> BinderyError:
    """Return the error of an answer with this status and body.

    It has the class of the error in the other broker if that is known by its code, else one with the same meaning: what
    is not known to have been refused may have been done (OutcomeUnknown). The loss of a topic by the other broker is
    TryAgain, because this broker has not lost its own topic.
    """
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except msgspec.MsgspecError:
        problem = _Problem()
    kind = _classes().get(problem.code)
    if kind is None and problem.code:
        kind = _BY_STATUS.get(status, Conflict if 400 <= status < 500 else OutcomeUnknown)
    elif kind is None:  # perhaps the answer of a proxy
        kind = OutcomeUnknown
    elif issubclass(kind, LostOwnership) or (issubclass(kind, TryAgain) and status == 503):
        kind = TryAgain
    message = problem.detail or f"another broker answered with status {status}"
    rendered = ": " + " ".join(f"{name}={value}" for name, value in problem.facts.items())
    return kind(message.removesuffix(rendered), **problem.facts)


@cache
def _classes() -> dict[str, type[BinderyError]]:
    """Return the classes of errors by code."""
    return {kind.code: kind for kind in _below(BinderyError)}


def _below(kind: type[BinderyError]) -> Iterator[type[BinderyError]]:
    for child in kind.__subclasses__():
        yield from _below(child)
        if "code" in vars(child):
            yield child
