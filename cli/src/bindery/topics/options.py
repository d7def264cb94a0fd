"""Options of the commands that use the HTTP API of a broker."""

from typing import Annotated

import typer

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
