"""Problems (RFC 9457) in FastAPI: handlers for errors of the framework, and the model of a problem for OpenAPI."""

from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.responses import Response

from bindery_kit.http.problem import problem_response

VALIDATION_ERRORS_MAX: Final = 20
"""Maximum number of wrong fields in one response, because a body may have thousands of wrong lines."""


class FieldError(BaseModel):
    where: str
    message: str


class Problem(BaseModel):
    """The body of every error response (RFC 9457)."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    type: str
    title: str
    status: int
    code: str
    """Stable identifier for programs."""
    detail: str
    facts: dict[str, Any] = {}
    errors: list[FieldError] | None = None


def install_refusals(app: FastAPI, *, validation_code: str = "validation_failed") -> None:
    """Make `app` return errors of FastAPI itself as problems.

    These are unknown paths, methods that are not allowed, and wrong parameters. The app handles its own errors.
    `validation_code`: the `code` of wrong parameters.
    """

    async def on_validation_error(_request: Request, error: Exception) -> Response:
        return _validation_problem(error, code=validation_code)

    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


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
