"""The OpenAPI document, made from the routes' table and the structs that also validate, and a page that shows it.

The page needs nothing from elsewhere: it works behind a port-forward and without the Internet.
"""

import ast
import functools
import html
import inspect
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from bindery_kit.problem import CONTENT_TYPE as PROBLEM_TYPE

from bindery_broker import __doc__ as package_doc
from bindery_broker.http import schemas
from bindery_broker.http.produce_request import NDJSON, PROPERTY_HEADER
from bindery_broker.http.router import Route
from bindery_broker.http.schemas import ID_PATTERN, MessageLine, MessageOut, Problem

Json = dict[str, Any]

VERSION: Final = "1.0.0"
_NAME: Final = {"type": "string", "pattern": r"^[-=:.A-Za-z0-9_]+$", "minLength": 1, "maxLength": 128}
_FREE: Final = {"type": "string", "pattern": r"^[^/\x00-\x1f\x7f]+$", "minLength": 1, "maxLength": 80}
_PATH: Final[dict[str, tuple[str, Json]]] = {
    "tenant": ("The tenant, `public` for instance; not `.` or `..`.", _NAME),
    "namespace": ("The namespace, `default` for instance; not `.` or `..`.", _NAME),
    "topic": ("The topic's local name, percent-encoded; at most 255 bytes as an HTML form value.", _FREE),
    "subscription": ("The subscription, percent-encoded; at most 255 bytes as an HTML form value.", _FREE),
    "consumer": ("The consumer's name, percent-encoded.", {**_FREE, "maxLength": 256}),
    "message_id": (
        "`ledgerId:entryId:partition:batchIndex`, the last two optional.",
        {"type": "string", "pattern": ID_PATTERN, "maxLength": 64},
    ),
}
_EVERYWHERE: Final = (400, 500, 503)
_OF_TOPICS: Final = (307, 504)
_TITLES: Final = {
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


def document(routes: Iterable[Route]) -> Json:
    routes = list(routes)
    structs: dict[type, None] = {MessageLine: None, MessageOut: None, Problem: None}
    for route in routes:
        if route.body is not None:
            structs[route.body] = None
        structs.update(dict.fromkeys(t for t in route.responses.values() if issubclass_of_struct(t)))
    components = _components(structs)
    paths: dict[str, Json] = {}
    for route in routes:
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Bindery broker",
            "version": VERSION,
            "description": f"{package_doc or ''}\n\nErrors are RFC 9457 problems with a stable `code`. Message ids are "
            "`ledgerId:entryId:partition:batchIndex`, -1 where there is none.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }


def encode(document: Json) -> bytes:
    return json.dumps(document, indent=1).encode() + b"\n"


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


def issubclass_of_struct(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, msgspec.Struct)


def _operation(route: Route) -> Json:
    parameters = [
        {"name": name, "in": "path", "required": True, "description": text, "schema": schema}
        for name, (text, schema) in _PATH.items()
        if "{" + name + "}" in route.template
    ]
    if route.query is not None:
        parameters += _query_parameters(route.query)
    operation: Json = {
        "operationId": route.operation_id,
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": parameters,
        "responses": _responses(route),
    }
    if route.handler.__doc__:
        operation["description"] = route.handler.__doc__
    if route.raw_body:
        operation["requestBody"] = _produce_body()
        operation["description"] = (
            f"Headers `{PROPERTY_HEADER.decode().title()}<name>` set properties (percent-encoded UTF-8). "
            "Everything is validated before anything is written."
        )
    elif route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _query_parameters(cls: type) -> list[Json]:
    schema = _components([cls])[cls.__name__]
    required = schema.get("required", [])
    parameters = []
    for name, field in schema["properties"].items():
        field = dict(field)
        description = field.pop("description", "")
        parameters.append(
            {"name": name, "in": "query", "required": name in required, "description": description, "schema": field}
        )
    return parameters


def _produce_body() -> Json:
    line = {"$ref": "#/components/schemas/MessageLine"}
    return {
        "description": "One message as it is, or many as NDJSON (one MessageLine a line) or a JSON array.",
        "required": True,
        "content": {
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "text/plain": {"schema": {"type": "string"}},
            "application/json": {"schema": {"type": "array", "minItems": 1, "maxItems": 10_000, "items": line}},
            NDJSON: {
                "schema": {"type": "string"},
                "example": '{"payload": "a", "key": "k"}\n{"payload_json": {"b": 1}}\n',
            },
        },
    }


def _responses(route: Route) -> dict[str, Json]:
    answers: dict[str, Json] = {}
    for status, cls in route.responses.items():
        answers[str(status)] = {
            "description": _TITLES[status],
            "content": {media: {"schema": _answer_schema(cls, media)} for media in route.media_types},
        }
    problems = {*_EVERYWHERE, *route.errors, *(_OF_TOPICS if route.needs_topic else ())}
    for status in sorted(problems):
        answer: Json = {"description": _TITLES[status]}
        if status >= 400:
            answer["content"] = {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
        answers[str(status)] = answer
    return answers


def _answer_schema(cls: Any, media: str) -> Json:
    if media != "application/json":
        return {"type": "string"}
    if issubclass_of_struct(cls):
        return {"$ref": f"#/components/schemas/{cls.__name__}"}
    return {"type": "object"}


def page(document: Json) -> bytes:
    """The document as one HTML page."""
    parts = [_HEAD, f"<h1>{_text(document['info']['title'])}</h1><p>{_text(document['info']['description'])}</p>"]
    parts.append('<p>For programs: <a href="openapi.json">openapi.json</a></p>')
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(_operation_html(method, path, operation))
    parts.append("<h2>Bodies</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f'<h3 id="{_text(name)}">{_text(name)}</h3>{_schema_html(schema)}')
    return "\n".join(parts).encode()


_HEAD: Final = """<!doctype html><meta charset="utf-8"><title>Bindery broker</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
code{background:#f3f3f3;padding:0 .2em}table{border-collapse:collapse;margin:.5rem 0}
td,th{border-top:1px solid #ddd;padding:.2rem .6rem;text-align:left;vertical-align:top}
h2{margin-top:2rem}details{margin:.4rem 0}summary{cursor:pointer}
.m{display:inline-block;min-width:4.5rem;font-weight:bold}
</style>"""


def _operation_html(method: str, path: str, operation: Mapping[str, Any]) -> str:
    rows = [
        (f"{p['name']} ({p['in']})", _type_html(p["schema"]), p.get("description", "")) for p in operation["parameters"]
    ]
    body = operation.get("requestBody", {}).get("content", {})
    rows += [(f"body {media}", _type_html(content["schema"]), "") for media, content in body.items()]
    answers = [
        (status, " ".join(_type_html(c["schema"]) for c in answer.get("content", {}).values()), answer["description"])
        for status, answer in operation["responses"].items()
    ]
    return (
        f'<details><summary><span class="m">{method.upper()}</span> <code>{_text(path)}</code> '
        f"{_text(operation['summary'])}</summary><p>{_text(operation.get('description', ''))}</p>"
        f"{_table(rows)}{_table(answers)}</details>"
    )


def _schema_html(schema: Mapping[str, Any]) -> str:
    rows = [
        (name, _type_html(field), field.get("description", "")) for name, field in schema.get("properties", {}).items()
    ]
    return f"<p>{_text(schema.get('description', ''))}</p>{_table(rows)}"


def _table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Rows of (name, type as HTML, text)."""
    lines = [f"<tr><td><code>{_text(a)}</code><td>{b}<td>{_text(c)}" for a, b, c in rows]
    return f"<table>{''.join(lines)}</table>" if lines else ""


def _type_html(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = _text(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if schema.get("type") == "array":
        return f"list of {_type_html(schema.get('items', {}))}"
    if "anyOf" in schema:
        return " or ".join(_type_html(option) for option in schema["anyOf"])
    facts = [str(schema.get("type", "any"))]
    facts += [json.dumps(schema["enum"])] if "enum" in schema else []
    facts += [f"default {json.dumps(schema['default'])}"] if "default" in schema else []
    for name in ("minimum", "maximum", "minLength", "maxLength", "maxItems"):
        facts += [f"{name} {schema[name]}"] if name in schema else []
    return _text(", ".join(facts))


def _text(value: object) -> str:
    return html.escape(str(value))
