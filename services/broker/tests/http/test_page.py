"""The page of the API: every operation and body of the OpenAPI document, escaped, in one file."""

from typing import Any

import pytest
from bindery_broker.http.page import page


def document(paths: dict[str, Any] | None = None, schemas: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "info": {"title": "A & B", "description": "Text <b>"},
        "paths": paths or {},
        "components": {"schemas": schemas or {}},
    }


def lines_of(document: dict[str, Any]) -> list[str]:
    """Return the lines below the head."""
    text = page(document).decode()
    head, _, rest = text.partition("</style>\n")
    assert head.startswith('<!doctype html><meta charset="utf-8"><title>Bindery broker</title>')
    return rest.split("\n")


def type_html(schema: dict[str, Any]) -> str:
    """Return the text of a field with this schema."""
    *_, body = lines_of(document(schemas={"Body": {"properties": {"x": schema}}}))
    before, _, rest = body.partition("<table><tr><td><code>x</code><td>")
    assert before == '<h3 id="Body">Body</h3><p></p>'
    text, _, after = rest.partition("<td>")
    assert after == "</table>"
    return text


def test_the_title_and_the_description_are_shown_escaped() -> None:
    assert lines_of(document()) == [
        "<h1>A &amp; B</h1><p>Text &lt;b&gt;</p>",
        '<p>For programs: <a href="openapi.json">openapi.json</a></p>',
        "<h2>Bodies</h2>",
    ]


def test_operations_have_their_parameters_bodies_and_answers() -> None:
    get = {
        "summary": "Read <all>",
        "description": "At & once.",
        "parameters": [
            {"name": "max", "in": "query", "schema": {"type": "integer"}, "description": "How <many>"},
            {"name": "t", "in": "path", "schema": {"type": "string"}},
        ],
        "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}}}},
        "responses": {
            "200": {
                "description": "Success.",
                "content": {"a/b": {"schema": {"type": "string"}}, "c/d": {"schema": {"type": "integer"}}},
            },
            "404": {"description": "Not <there>"},
        },
    }
    delete = {"summary": "Delete", "responses": {}}
    _, _, first, second, last = lines_of(document({"/v1/<t>": {"get": get, "delete": delete}}))
    assert first == (
        '<details><summary><span class="m">GET</span> <code>/v1/&lt;t&gt;</code> Read &lt;all&gt;</summary>'
        "<p>At &amp; once.</p>"
        "<table>"
        "<tr><td><code>max (query)</code><td>integer<td>How &lt;many&gt;"
        "<tr><td><code>t (path)</code><td>string<td>"
        '<tr><td><code>body application/json</code><td><a href="#Body">Body</a><td>'
        "</table>"
        "<table>"
        "<tr><td><code>200</code><td>string integer<td>Success."
        "<tr><td><code>404</code><td><td>Not &lt;there&gt;"
        "</table></details>"
    )
    assert second == (
        '<details><summary><span class="m">DELETE</span> <code>/v1/&lt;t&gt;</code> Delete</summary><p></p></details>'
    )
    assert last == "<h2>Bodies</h2>"


def test_bodies_have_an_anchor_and_a_table_of_their_fields() -> None:
    schemas = {
        "A<b>": {"description": "One & all", "properties": {"x": {"type": "string", "description": "The <x>"}}},
        "Empty": {},
    }
    *_, title, first, second = lines_of(document(schemas=schemas))
    assert title == "<h2>Bodies</h2>"
    assert first == (
        '<h3 id="A&lt;b&gt;">A&lt;b&gt;</h3><p>One &amp; all</p>'
        "<table><tr><td><code>x</code><td>string<td>The &lt;x&gt;</table>"
    )
    assert second == '<h3 id="Empty">Empty</h3><p></p>'


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({}, "any"),
        ({"type": "string"}, "string"),
        ({"$ref": "#/components/schemas/Other"}, '<a href="#Other">Other</a>'),
        ({"type": "array", "items": {"type": "integer"}}, "list of integer"),
        ({"type": "array"}, "list of any"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/x/O"}]}, 'string or <a href="#O">O</a>'),
        ({"enum": ["a", "b"]}, "any, [&quot;a&quot;, &quot;b&quot;]"),
        ({"type": "string", "default": "a"}, "string, default &quot;a&quot;"),
        ({"type": "boolean", "default": False}, "boolean, default false"),
        ({"type": "integer", "maximum": 9, "minimum": 0}, "integer, minimum 0, maximum 9"),
        (
            {"type": "string", "minLength": 1, "maxLength": 2, "maxItems": 3},
            "string, minLength 1, maxLength 2, maxItems 3",
        ),
        ({"type": "<a>"}, "&lt;a&gt;"),
    ],
)
def test_types_are_shown_with_their_limits_and_defaults(schema: dict[str, Any], text: str) -> None:
    assert type_html(schema) == text
