"""Read secrets from files, the environment or the terminal, so that none appears in a command line.

The command line of a process can be read by every user of the machine, and its environment by the same user and often
by logs of containers. A file is the safest source.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from bindery_core.errors import BadRequest

VARIABLE: Final = "BINDERY_LEDGER_PASSWORD"
"""Name of the environment variable with the password of the ledger."""
FILE_VARIABLE: Final = "BINDERY_LEDGER_PASSWORD_FILE"
"""Name of the environment variable with the path of the password file."""

PasswordFile = Annotated[
    str | None,
    typer.Option(
        "--password-file",
        metavar="FILE",
        envvar=FILE_VARIABLE,
        show_envvar=True,
        help="File with the password of the ledger, for digests of type mac; - asks on the terminal.",
    ),
]


def read_password(file: str | None) -> bytes:
    """Return the password from `file`, from the terminal for `-`, or from BINDERY_LEDGER_PASSWORD; else it is empty.

    One line end at the end of the file is not part of the password. Raises BadRequest.
    """
    if file is None:
        return os.environ.get(VARIABLE, "").encode()
    if file == "-":
        if not sys.stdin.isatty():
            raise BadRequest("--password-file - needs a terminal; name a file instead")
        return str(typer.prompt("Password", hide_input=True, err=True)).encode()
    return _read(file, "password").removesuffix(b"\n").removesuffix(b"\r")


def read_token(file: str) -> str:
    """Return the bearer token in `file`: its first line, because a service's file of secrets has one per line.

    Raises BadRequest if it cannot be read, or is empty.
    """
    lines = [line.strip() for line in _read(file, "token").splitlines() if line.strip()]
    if not lines:
        raise BadRequest("the token file is empty", token_file=file)
    try:
        return lines[0].decode("ascii")
    except UnicodeDecodeError as error:
        raise BadRequest(f"cannot read the token file: {error}") from error


def _read(file: str, what: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise BadRequest(f"cannot read the {what} file: {error}") from error
