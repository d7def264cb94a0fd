"""Options of the commands that use the HTTP API of a broker."""

from collections.abc import Sequence
from typing import Annotated

import typer
from bindery_core.errors import BadRequest

Topic = Annotated[
    str, typer.Argument(metavar="TOPIC", show_default=False, help="Topic: NAME or TENANT/NAMESPACE/NAME.")
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        envvar="BINDERY_URL",
        show_envvar=True,
        help="URL of a broker; default: http://127.0.0.1:8080.",
    ),
]
Properties = Annotated[
    list[str] | None, typer.Option("--property", metavar="NAME=VALUE", help="Property of the subscription; repeatable.")
]


def parse_properties(given: Sequence[str]) -> dict[str, str]:
    """Return the properties that texts NAME=VALUE set. Raises BadRequest."""
    pairs = [text.partition("=") for text in given]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise BadRequest("a property has the form NAME=VALUE", given=name)
    return {name: value for name, _, value in pairs}
