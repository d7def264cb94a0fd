"""Errors of the error tree as RFC 9457 `application/problem+json`, the same for every service.

| field       | meaning                                                                  |
|-------------|--------------------------------------------------------------------------|
| type        | `urn:bindery:problem:<code>`                                             |
| title       | the kind of error in words                                               |
| status      | as in the status line                                                    |
| code        | stable identifier for programs (`no_such_topic`); `bindery_core.errors`  |
| detail      | what happened, for people                                                |
| facts       | values in the detail: `{"ledger_id": 7}`                                 |
| errors      | only for wrong fields: one object for each, with `where` and `message`   |

429 and 503 have a `Retry-After` header (seconds). An error outside the error tree is a 500 with code `internal`; its
text is only logged, because it may be confidential.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from bindery_core.errors import BinderyError
from starlette.responses import Response

CONTENT_TYPE: Final = "application/problem+json"
RETRY_AFTER_S: Final = 1
"""Value in seconds of the Retry-After header of 429 and 503."""


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
    """Return an error response. `members`: further top-level fields of the body; None values are left out."""
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
    """Return `error` as a response, with the status and code of its class.

    Errors that say so themselves (`retry_after_s`) have `Retry-After`, too.
    """
    retry_after_s = getattr(error, "retry_after_s", None)
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return problem_response(status=error.status, code=error.code, detail=str(error), facts=error.facts, headers=headers)
