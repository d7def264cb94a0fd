"""Complete FastAPI's OpenAPI document with problems and with the msgspec structs of hot operations."""

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec
from bindery_kit.http.problem import CONTENT_TYPE as PROBLEM_TYPE
from bindery_kit.http.problem_fastapi import Problem

Json = dict[str, Any]

_EVERYWHERE: Final = (400, 401, 403, 431, 500, 503)
"""Error statuses of every operation."""
BODY_ERRORS: Final = (408, 413, 415, 429)
"""Further error statuses of operations with a body."""
OF_TOPICS: Final = (307, 404, 413, 504)
"""Further statuses of operations on a topic."""
TITLES: Final = {
    200: "Success.",
    201: "Created.",
    207: "Some messages were stored and others were not: one result for each message, in order.",
    307: "Only with `redirect=true`: `Location` is the same path on the broker that owns the topic.",
    400: "The request is invalid; `detail` says where.",
    401: "The broker requires credentials, and the request has none that it accepts.",
    403: "The host, the origin or the role of the request is not allowed; `code` says which.",
    404: "The topic, subscription or message does not exist.",
    408: "The body did not arrive in time.",
    409: "The resource is in a state that does not allow this; `code` says which.",
    413: "The request exceeds a limit; `facts` has the limit.",
    415: "The content type is not supported.",
    422: "The metadata of a stored message is too large (`facts.message_id` is its id), or the idempotency key belongs "
    "to a request with other content; `code` says which.",
    429: "A limit on memory or on the number of consumers is reached; retry after `Retry-After` seconds.",
    431: "The request line and the headers are too large.",
    500: "The service failed, or stored data is damaged.",
    503: "Nothing was changed; retry after `Retry-After` seconds.",
    504: "The outcome is unknown: no answer came from the bookies or from another broker.",
    507: "A backlog of the topic exceeds its quota, so that nothing is stored.",
}


def problems(*statuses: int) -> dict[int | str, Json]:
    """Return `responses` for these error statuses and those that every operation has."""
    answer = {PROBLEM_TYPE: {"schema": reference(Problem)}}
    return {
        status: {"description": TITLES[status], **({"content": answer} if status >= 400 else {})}
        for status in sorted({*statuses, *_EVERYWHERE})
    }


def answers(structs: Mapping[int, Any], media_types: Collection[str] = ("application/json",)) -> dict[int | str, Json]:
    """Return `responses`. `structs`: type of the answer by status; None: text."""
    return {
        status: {
            "description": TITLES[status],
            "content": {
                media: {"schema": reference(cls) if cls and media == "application/json" else {"type": "string"}}
                for media in media_types
            },
        }
        for status, cls in structs.items()
    }


def reference(struct: type) -> Json:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}


def query_parameters(struct: type[msgspec.Struct]) -> list[Json]:
    schema = _components([struct])[struct.__name__]
    required = schema.get("required", [])
    parameters = []
    for name, field in schema["properties"].items():
        field = dict(field)
        description = field.pop("description", "")
        parameters.append(
            {"name": name, "in": "query", "required": name in required, "description": description, "schema": field}
        )
    return parameters


def complete(document: Json, structs: Iterable[type[msgspec.Struct]]) -> Json:
    """Add the schemas of `structs` and of problems, and remove those of FastAPI's own validation errors."""
    components = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    added = {**_components(structs), **problem.pop("$defs", {}), "Problem": problem}
    assert not components.keys() & added.keys()
    components.update(added)
    for operations in document["paths"].values():
        for operation in operations.values():
            if "application/json" in operation["responses"].get("422", {}).get("content", {}):
                del operation["responses"]["422"]
    return document


@functools.cache
def _field_docs(module: str) -> dict[tuple[str, str], str]:
    """Map (struct, field) to the string below the field; inherited fields appear under each subclass."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    docs: dict[tuple[str, str], str] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            inherited = {field: text for (cls, field), text in docs.items() if cls == getattr(base, "id", "")}
            docs.update({(node.name, field): text for field, text in inherited.items()})
        for item, below in itertools.pairwise(node.body):
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                docs[node.name, item.target.id] = " ".join(str(below.value.value).split())
    return docs


def _components(structs: Iterable[type]) -> dict[str, Json]:
    """Return JSON schemas by name. The strings below the fields become their descriptions."""
    structs = list(structs)
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    docs: dict[tuple[str, str], str] = {}
    for module in {struct.__module__ for struct in structs}:
        docs |= _field_docs(module)
    for name, schema in components.items():
        for field, about in schema.get("properties", {}).items():
            text = docs.get((name, field))
            if text and "$ref" not in about:
                about.setdefault("description", text)
    return components
