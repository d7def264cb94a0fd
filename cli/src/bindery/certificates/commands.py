"""`bindery certificates`: make and renew the certificates of a cluster, or all of its secrets, and look into them.

The commands work on one directory, whose files `bindery_identity.cluster_secrets` lists. Each of them can be repeated:
it keeps what is usable, and renews what is near its end.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from bindery_core.errors import BadRequest

from bindery.common.options import AsJson, group
from bindery.common.output import emit, print_json, print_lines

if TYPE_CHECKING:
    from bindery_identity.cluster_secrets import Made, Wanted

app = group("Make and renew certificates, and all secrets of a cluster.")

Directory = Annotated[
    Path,
    typer.Option(
        "-d", "--directory", metavar="DIR", help="Directory of the files; if it does not exist, it is created."
    ),
]
Days = Annotated[int, typer.Option("--days", metavar="N", show_default=True, help="Days that they are valid.")]


@app.callback()
def certificates() -> None:
    """Make and renew certificates, and all secrets of a cluster."""


@app.command("create-ca")
def create_ca(directory: Directory, as_json: AsJson = False) -> None:
    """Create a certificate authority: ca.crt, which clients and services trust, and ca.key, which signs.

    Example: bindery certificates create-ca --directory secrets
    """
    from bindery_identity.cluster_secrets import Wanted

    _make(directory, Wanted(), authority=True, as_json=as_json)


@app.command("create")
def create(
    directory: Directory,
    name: Annotated[
        str, typer.Argument(metavar="NAME", show_default=False, help="Common name, and name of the files.")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host", metavar="HOST", help="DNS name or address of the server; repeatable; default: a client's."
        ),
    ] = None,
    days: Days = 365,
    as_json: AsJson = False,
) -> None:
    """Create the certificate of a server or a client, or renew it: NAME.crt and NAME.key; for servers also NAME.pem.

    Example: bindery certificates create --directory secrets broker-0 --host broker-0.example.com --host 10.0.0.5
    """
    from bindery_identity.cluster_secrets import Wanted

    wanted = Wanted(servers={name: host}, days=days) if host else Wanted(clients=[name], days=days)
    _make(directory, wanted, authority=False, as_json=as_json)


@app.command("create-cluster")
def create_cluster(
    directory: Directory,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="NAME=HOST,...", help="Server and its names or addresses; repeatable."),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option("--client", metavar="NAME", help="Client with a certificate; repeatable.")
    ] = None,
    role: Annotated[
        list[str] | None, typer.Option("--role", metavar="ROLE", help="Role with a token; repeatable.")
    ] = None,
    zookeeper: Annotated[
        bool, typer.Option("--zookeeper-credentials", help="Credentials for ZooKeeper (digest), too.")
    ] = False,
    days: Days = 365,
    as_json: AsJson = False,
) -> None:
    """Create all secrets of a cluster that are missing, and renew certificates and tokens that are near their end.

    Run it from time to time: services follow the files. It reports each file as created, renewed or kept.

    Example: bindery certificates create-cluster -d secrets --server broker=10.0.0.5,broker-0.example.com --role admin
    """
    from bindery_identity.cluster_secrets import Wanted

    servers: dict[str, list[str]] = {}
    for text in server or ():
        name, equals, hosts = text.partition("=")
        if not equals:
            raise BadRequest("--server has the form NAME=HOST,HOST", given=text)
        servers.setdefault(name, []).extend(filter(None, hosts.split(",")))
    wanted = Wanted(servers=servers, clients=client or (), roles=role or (), zookeeper=zookeeper, days=days)
    _make(directory, wanted, authority=True, as_json=as_json)


@app.command("kubernetes")
def kubernetes(
    plan: Annotated[
        str,
        typer.Option(
            "--plan",
            metavar="JSON",
            envvar="BINDERY_SECRETS_PLAN",
            show_envvar=True,
            show_default=False,
            help="The Secrets, and what they contain; the chart writes it.",
        ),
    ],
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Replace the authority and the keys of tokens, in steps.")
    ] = False,
    settle: Annotated[
        int,
        typer.Option(
            "--settle",
            metavar="SECONDS",
            min=0,
            show_default=True,
            help="Wait between two steps until pods have the files.",
        ),
    ] = 180,
    api: Annotated[
        str,
        typer.Option("--api", metavar="URL", help="Kubernetes API, as of `kubectl proxy`; default: that of this pod."),
    ] = "",
) -> None:
    """Fill the Secrets of a release on Kubernetes, and renew certificates and tokens that are near their end.

    The jobs of the chart run it. It can be repeated at any time, and completes a replacement that was interrupted.

    Example: bindery certificates kubernetes --api http://127.0.0.1:8001 --plan "$PLAN" --rotate
    """
    import os

    from bindery.certificates.kubernetes import KubernetesSecrets, Plan, fill

    wanted = Plan.parse(plan)
    where = KubernetesSecrets(api, wanted.namespace) if api else KubernetesSecrets.of_pod(os.environ, wanted.namespace)
    fill(where, wanted, clock=time.time, sleep=time.sleep, settle_s=settle, replace=rotate)


@app.command("show")
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="Certificate (PEM).")],
    as_json: AsJson = False,
) -> None:
    """Show whose certificate a file has, which hosts it is for, who signed it, and when it expires.

    Example: bindery certificates show secrets/broker.crt
    """
    from bindery_identity.authority import facts

    try:
        content = file.read_bytes()
    except OSError as error:
        raise BadRequest(f"cannot read the certificate: {error.strerror or error}", file=str(file)) from error
    found = facts(content)
    days = (found.expires_at_s - time.time()) / 86_400
    emit(
        {
            "common_name": found.common_name,
            "issuer": found.issuer,
            "hosts": list(found.hosts),
            "authority": found.is_authority,
            "begins_at": _time(found.begins_at_s),
            "expires_at": _time(found.expires_at_s),
            "near_its_end": found.is_near_its_end(time.time()),
        },
        [
            f"{found.common_name}{', an authority' if found.is_authority else ''}, signed by {found.issuer}",
            f"hosts: {', '.join(found.hosts) or 'none'}",
            f"valid from {_time(found.begins_at_s)} until {_time(found.expires_at_s)} ("
            + (f"{days:.0f} days left)" if days > 0 else "EXPIRED)"),
        ],
        as_json=as_json,
    )


def _make(directory: Path, wanted: "Wanted", *, authority: bool, as_json: bool) -> None:
    from bindery_identity.cluster_secrets import create as create_secrets

    made = create_secrets(directory, wanted, now_s=time.time(), authority=authority)
    if as_json:
        for one in made:
            print_json(_facts(one))
    else:
        print_lines(lines(made))


def lines(made: "Sequence[Made]") -> list[str]:
    """Return one line per file: what happened to it, its path, when it expires, and why it was renewed."""
    return [
        f"{one.action:<8} {one.file}"
        + (f"  (until {_time(one.expires_at_s)})" if one.expires_at_s is not None else "")
        + (f": {one.why}" if one.why else "")
        for one in made
    ]


def _facts(made: "Made") -> dict[str, Any]:
    return {
        "file": str(made.file),
        "action": str(made.action),
        "expires_at": None if made.expires_at_s is None else _time(made.expires_at_s),
        "reason": made.why,
    }


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
