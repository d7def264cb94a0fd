"""Errors as HTTP: one handler turns the error tree into RFC 9457 `application/problem+json`, for every service.

| field       | meaning                                                                  |
|-------------|--------------------------------------------------------------------------|
| type        | `urn:bindery:problem:<code>`                                             |
| title       | the kind of error in words, the same for each of its kind                |
| status      | as in the status line                                                    |
| code        | stable, for programs (`no_such_topic`); see bindery_core.errors          |
| detail      | what happened here, for people                                           |
| facts       | the fields behind the detail: `{"ledger_id": 7}`                         |
| errors      | only `validation_failed`: one object per wrong field: `where`, `message` |

429 and 503 carry `Retry-After` (seconds). An error that is none of ours is a 500 with code `internal`, and its text
stays in the log: it may hold what a stranger should not read.
"""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from bindery_core.errors import BinderyError
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from bindery_kit.logs import error_fields, get_logger

CONTENT_TYPE: Final = "application/problem+json"
RETRY_AFTER_S: Final = 1
VALIDATION_ERRORS_MAX: Final = 20
"""Wrong fields named in one answer; a body with thousands of wrong lines must not become a body of megabytes."""

log = get_logger(__name__)


class FieldError(BaseModel):
    where: str
    message: str


class Problem(BaseModel):
    """The body of every error answer (RFC 9457)."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    type: str
    title: str
    status: int
    code: str
    """Stable, for programs."""
    detail: str
    facts: dict[str, Any] = {}
    errors: list[FieldError] | None = None


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


def install_problems(app: FastAPI) -> None:
    """Make every error of `app` a problem answer, and its OpenAPI document say so."""
    app.add_exception_handler(BinderyError, _on_bindery_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected)
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _with_problems(make())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


async def _on_bindery_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BinderyError)
    if error.status >= 500 and error.status not in (503, 504):
        log.error("request_failed", method=request.method, path=request.url.path, **error_fields(error), exc_info=error)
    return problem_of(error)


async def _on_validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    errors = [
        {"where": ".".join(str(part) for part in e["loc"]), "message": str(e["msg"])}
        for e in found[:VALIDATION_ERRORS_MAX]
    ]
    detail = "; ".join(f"{e['where']}: {e['message']}" for e in errors[:3])
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return problem_response(status=400, code="validation_failed", detail=detail + more, errors=errors)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).name.lower()
    detail = str(error.detail)
    if error.status_code == 404 and detail == "Not Found":
        detail = f"nothing is served at {request.url.path}; the API is described at /docs"
    elif error.status_code == 405:
        detail = f"{request.method} is not served at {request.url.path}"
    return problem_response(status=error.status_code, code=code, detail=detail, headers=error.headers)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises it again behind us, for the server's log; ours has the path beside it.
    log.error("request_failed", method=request.method, path=request.url.path, **error_fields(error))
    return problem_response(status=500, code="internal", detail="an error of ours; the service's log has the details")


def _with_problems(schema: dict[str, Any]) -> dict[str, Any]:
    """The document with our error answers: FastAPI's 422 goes (we answer 400), every operation gets a `default`
    problem."""
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs", {}))
    schemas["Problem"] = problem
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    answer = {
        "description": "an error (RFC 9457)",
        "content": {CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    for operations in schema.get("paths", {}).values():
        for operation in operations.values():
            if isinstance(operation, dict) and "responses" in operation:
                operation["responses"].pop("422", None)
                operation["responses"].setdefault("default", answer)
    return schema
