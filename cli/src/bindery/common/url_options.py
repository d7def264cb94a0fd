"""The options --ca-file and --token-file of all commands that send requests to a service (those with --url)."""

import os
from contextvars import ContextVar
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command


class UrlOption:
    """An option whose value is that of the running command, so that no command passes it on."""

    def __init__(self, name: str, *, variable: str, help: str) -> None:
        """`name`: of the parameter; `variable`: the environment variable that also sets it."""
        self.name = name
        self.variable = variable
        self._help = help
        self._value = ContextVar(name, default="")

    def value(self) -> str:
        """Return the file that the running command has; empty: none."""
        return self._value.get() or os.environ.get(self.variable, "")

    def parameter(self) -> Any:
        """Return the option as an object of typer's, which makes them from the signatures of functions only."""
        carrier = typer.Typer(add_completion=False)

        def keep(given: str | None) -> None:
            self._value.set(given or "")

        def carry(file: str | None = None) -> None: ...

        carry.__annotations__["file"] = Annotated[
            str | None,
            typer.Option(
                f"--{self.name.replace('_', '-')}",
                metavar="FILE",
                envvar=self.variable,
                show_envvar=True,
                expose_value=False,
                callback=keep,
                help=self._help,
            ),
        ]
        carrier.command()(carry)
        made = get_command(carrier).params[0]
        made.name = self.name
        return made


TOKEN_FILE: Final = UrlOption(
    "token_file", variable="BINDERY_TOKEN_FILE", help="File with the bearer token of the client."
)
CA_FILE: Final = UrlOption(
    "ca_file",
    variable="BINDERY_HTTP_CA_FILE",
    help="CA certificates (PEM) that sign those of https URLs; default: those that the system trusts.",
)


class UrlGroup(TyperGroup):
    """A group that adds the options to its commands that have `--url` and no such option of their own."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for option in (TOKEN_FILE, CA_FILE):
            parameter = option.parameter()
            for command in self.commands.values():
                names = [parameter.name for parameter in command.params]
                if "url" in names and option.name not in names:
                    command.params.insert(names.index("url") + 1, parameter)
