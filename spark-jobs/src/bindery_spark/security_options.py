"""Options of the commands that connect to bookies: files with credentials, each of which an environment variable also
names. Those for ZooKeeper have variables only, as in all `bindery` commands."""

from typing import Annotated

import typer

TokenFile = Annotated[
    str,
    typer.Option("--token-file", metavar="FILE", help="Token presented to bookies (BINDERY_CLIENT_TOKEN_FILE)."),
]
CaFile = Annotated[
    str,
    typer.Option(
        "--ca-file",
        metavar="FILE",
        help="CA of the bookies' certificates; enables TLS (BINDERY_CLIENT_CA_FILE).",
    ),
]
CertificateFile = Annotated[
    str,
    typer.Option("--certificate-file", metavar="FILE", help="Client certificate (BINDERY_CLIENT_CERTIFICATE_FILE)."),
]
KeyFile = Annotated[
    str, typer.Option("--key-file", metavar="FILE", help="Key of the client certificate (BINDERY_CLIENT_KEY_FILE).")
]
AuthPlugin = Annotated[
    str,
    typer.Option("--auth-plugin", metavar="NAME", help="Authentication plugin of the bookies (BINDERY_CLIENT_PLUGIN)."),
]
CheckHostname = Annotated[
    bool,
    typer.Option(
        "--check-hostname/--no-check-hostname",
        help="Verify host names in bookies' certificates (BINDERY_CLIENT_CHECK_HOSTNAME).",
    ),
]
