"""Errors as HTTP: the error tree as RFC 9457 `application/problem+json`, the same for every service.

| field       | meaning                                                                  |
|-------------|--------------------------------------------------------------------------|
| type        | `urn:bindery:problem:<code>`                                             |
| title       | the kind of error in words, the same for each of its kind                |
| status      | as in the status line                                                    |
| code        | stable, for programs (`no_such_topic`); see bindery_core.errors          |
| detail      | what happened here, for people                                           |
| facts       | the fields behind the detail: `{"ledger_id": 7}`                         |
| errors      | only where fields are wrong: one object for each: `where`, `message`     |

429 and 503 carry `Retry-After` (seconds). An error that is none of ours is a 500 with code `internal`, and its text
stays in the log: it may hold what a stranger should not read.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from bindery_core.errors import BinderyError
from starlette.responses import Response

CONTENT_TYPE: Final = "application/problem+json"
RETRY_AFTER_S: Final = 1


def problem_response(
    *,
    status: int,
    code: str,
    detail: str,
    title: str | None = None,
    facts: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    **members: Any,
) -> Response:
    """An error answer. `members` are further top-level fields of the body; None ones are left out."""
    body: dict[str, Any] = {
        "type": f"urn:bindery:problem:{code}",
        "title": title or code.replace("_", " "),
        "status": status,
        "code": code,
        "detail": detail,
        "facts": dict(facts or {}),
        **{name: value for name, value in members.items() if value is not None},
    }
    all_headers = dict(headers or {})
    if status in (429, 503):
        all_headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    content = json.dumps(body, default=str).encode() + b"\n"
    return Response(content, status_code=status, headers=all_headers, media_type=CONTENT_TYPE)


def problem_of(error: BinderyError) -> Response:
    """`error` as an answer; status and code are its class's."""
    return problem_response(status=error.status, code=error.code, detail=str(error), facts=error.facts)
