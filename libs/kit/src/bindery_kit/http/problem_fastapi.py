"""Problems for FastAPI: what an app refuses or fails at becomes a problem answer, and its document says so."""

from http import HTTPStatus
from typing import Any, Final

from bindery_core.errors import BinderyError
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.responses import Response

from bindery_kit.http.problem import CONTENT_TYPE, problem_of, problem_response
from bindery_kit.observability.logs import error_fields, get_logger

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


def install_problems(app: FastAPI) -> None:
    """Make every error of `app` a problem answer, and its OpenAPI document say so."""
    install_refusals(app)
    app.add_exception_handler(BinderyError, _on_bindery_error)
    app.add_exception_handler(Exception, _on_unexpected)
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _with_problems(make())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def install_refusals(app: FastAPI, *, validation_code: str = "validation_failed") -> None:
    """Only what FastAPI itself refuses: no such path or method, wrong parameters. `install_problems` does this too.

    For an app that answers errors of the tree itself. `validation_code`: the `code` of wrong parameters.
    """

    async def on_validation_error(_request: Request, error: Exception) -> Response:
        return _validation_problem(error, code=validation_code)

    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_bindery_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BinderyError)
    if error.status >= 500 and error.status not in (503, 504):
        log.error("request_failed", method=request.method, path=request.url.path, **error_fields(error), exc_info=error)
    return problem_of(error)


def _validation_problem(error: Exception, *, code: str) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    errors = [
        {"where": ".".join(str(part) for part in e["loc"]), "message": str(e["msg"])}
        for e in found[:VALIDATION_ERRORS_MAX]
    ]
    detail = "; ".join(f"{e['where']}: {e['message']}" for e in errors[:3])
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return problem_response(status=400, code=code, detail=detail + more, errors=errors)


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
