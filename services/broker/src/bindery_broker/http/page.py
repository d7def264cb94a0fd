"""Render the OpenAPI document as one HTML page that loads nothing else.

The page works behind a port-forward and without Internet access.
"""

import html
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from bindery_kit.http.page_headers import page_headers


def page(document: Mapping[str, Any]) -> bytes:
    """Return the document as one HTML page."""
    parts = [_HEAD, f"<h1>{_text(document['info']['title'])}</h1><p>{_text(document['info']['description'])}</p>"]
    parts.append('<p>For programs: <a href="openapi.json">openapi.json</a></p>')
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(_operation_html(method, path, operation))
    parts.append("<h2>Bodies</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f'<h3 id="{_text(name)}">{_text(name)}</h3>{_schema_html(schema)}')
    return "\n".join(parts).encode()


_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
code{background:#f3f3f3;padding:0 .2em}table{border-collapse:collapse;margin:.5rem 0}
td,th{border-top:1px solid #ddd;padding:.2rem .6rem;text-align:left;vertical-align:top}
h2{margin-top:2rem}details{margin:.4rem 0}summary{cursor:pointer}
.m{display:inline-block;min-width:4.5rem;font-weight:bold}
"""
_HEAD: Final = f'<!doctype html><meta charset="utf-8"><title>Bindery broker</title><style>{_STYLE}</style>'
HEADERS: Final = page_headers(_STYLE)
"""Headers of the page."""


def _operation_html(method: str, path: str, operation: Mapping[str, Any]) -> str:
    rows = [
        (f"{p['name']} ({p['in']})", _type_html(p["schema"]), p.get("description", ""))
        for p in operation.get("parameters", ())
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
    """Return an HTML table. `rows`: (name, type as HTML, text)."""
    lines = [f"<tr><td><code>{_text(a)}</code><td>{b}<td>{_text(c)}" for a, b, c in rows]
    return f"<table>{''.join(lines)}</table>" if lines else ""


def _type_html(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = _text(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "prefixItems" in schema:
        return f"[{', '.join(_type_html(part) for part in schema['prefixItems'])}]"
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
