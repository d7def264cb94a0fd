"""What FastAPI cannot know of the OpenAPI document: problems, and the msgspec structs of hot operations."""

import ast
import functools
import inspect
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec
from bindery_kit.http.problem import CONTENT_TYPE as PROBLEM_TYPE

from bindery_broker.http import schemas
from bindery_broker.http.produce_request import NDJSON
from bindery_broker.http.schemas import MessageLine, Problem

Json = dict[str, Any]

_EVERYWHERE: Final = (400, 500, 503)
BODY_ERRORS: Final = (408, 413, 415, 429)
OF_TOPICS: Final = (307, 404, 413, 504)
TITLES: Final = {
    200: "Done.",
    201: "Made.",
    207: "Some messages were stored, others not: one result for each, in order.",
    307: "With `redirect=true`: the topic's owner is there.",
    400: "The request is wrong; `detail` says where.",
    404: "There is no such thing.",
    408: "The body did not arrive in time.",
    409: "It is not in the state that this needs; `code` says which.",
    413: "Over a named limit.",
    415: "Another content type is needed.",
    422: "A stored message cannot be decoded; `facts.message_id` names it.",
    429: "A budget is used up; ask again after `Retry-After`.",
    500: "A fault of the service, or damaged data.",
    503: "Nothing happened; ask again after `Retry-After`.",
    504: "It may have happened: the answer was lost on the way to the bookies or to another broker.",
}
PRODUCE_BODY: Final[Json] = {
    "description": "One message as it is, or many as NDJSON (one MessageLine a line) or a JSON array.",
    "required": True,
    "content": {
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        "text/plain": {"schema": {"type": "string"}},
        "application/json": {
            "schema": {
                "type": "array",
                "minItems": 1,
                "maxItems": schemas.MESSAGES_PER_REQUEST_MAX,
                "items": {"$ref": "#/components/schemas/MessageLine"},
            }
        },
        NDJSON: {
            "schema": {"type": "string"},
            "example": '{"payload": "a", "key": "k"}\n{"payload_json": {"b": 1}}\n',
        },
    },
}


def problems(*statuses: int) -> dict[int | str, Json]:
    """`responses` of an operation that refuses with these, beside what every operation refuses with."""
    answer = {PROBLEM_TYPE: {"schema": reference(Problem)}}
    return {
        status: {"description": TITLES[status], **({"content": answer} if status >= 400 else {})}
        for status in sorted({*statuses, *_EVERYWHERE})
    }


def answers(structs: Mapping[int, Any], media_types: Collection[str] = ("application/json",)) -> dict[int | str, Json]:
    """`responses` of an operation that answers with these structs; None: text."""
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


def reference(struct: type[msgspec.Struct]) -> Json:
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
    """Add the structs; take out FastAPI's own validation error, for ours are problems."""
    components = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    added = _components([MessageLine, Problem, *structs])
    assert not components.keys() & added.keys()
    components.update(added)
    for operations in document["paths"].values():
        for operation in operations.values():
            if "application/json" in operation["responses"].get("422", {}).get("content", {}):
                del operation["responses"]["422"]
    return document


@functools.cache
def _field_docs() -> dict[tuple[str, str], str]:
    """(struct, field) -> the string below the field in `schemas`; a base's fields under each class that has them."""
    tree = ast.parse(inspect.getsource(schemas))
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
    """JSON schemas by name, fields described by the docstrings below them."""
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    docs = _field_docs()
    for name, schema in components.items():
        for field, about in schema.get("properties", {}).items():
            text = docs.get((name, field))
            if text and "$ref" not in about:
                about.setdefault("description", text)
    return components
