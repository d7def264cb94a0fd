"""`bindery tokens`: create keys and tokens, and look into tokens.

The options and their defaults are those of `pulsar tokens`, with one exception: neither keys nor tokens are arguments,
because every user of the machine can read command lines. Files with secrets are created for their owner only, and no
existing file is replaced.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer
from bindery_core.errors import AlreadyExists, BadRequest
from bindery_identity.followed import FollowedFile
from bindery_identity.keys import ALGORITHMS, Key, key_file, private_key
from bindery_identity.new_keys import new_key_pair, new_secret_key
from bindery_identity.secret_directory import PUBLIC_MODE, SECRET_MODE
from bindery_identity.tokens import SignedTokens, is_subject, sign, unverified

from bindery.common.credentials import read_token
from bindery.common.options import AsJson, group
from bindery.common.output import emit, print_json

UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}
"""Seconds of each unit of a duration. Source: Pulsar's RelativeTimeUtil."""

app = group("Create keys and tokens, and look into tokens.")

Algorithm = Annotated[
    str,
    typer.Option(
        "-a", "--signature-algorithm", metavar="NAME", show_default=True, help="Algorithm, such as HS256 or ES256."
    ),
]
AnyAlgorithm = Annotated[
    str | None,
    typer.Option(
        "-a",
        "--signature-algorithm",
        metavar="NAME",
        help="Algorithm; default: the first of the key, as RS256.",
    ),
]
SecretKey = Annotated[
    str | None,
    typer.Option("-sk", "--secret-key", metavar="FILE", help="File of the secret key: a path, or file:///path."),
]
FromStdin = Annotated[bool, typer.Option("-i", "--stdin", help="Read the token from stdin.")]
FromFile = Annotated[str | None, typer.Option("-f", "--token-file", metavar="FILE", help="File with the token.")]


@app.callback()
def tokens() -> None:
    """Create keys and tokens, and look into tokens."""


@app.command("create-secret-key")
def create_secret_key(
    algorithm: Algorithm = "HS256",
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="File to create; default: stdout.")
    ] = None,
    as_base64: Annotated[bool, typer.Option("-b", "--base64", help="Write base64 instead of bytes.")] = False,
) -> None:
    """Create a secret key, which signs tokens and verifies them.

    Services read the file with `file:///path`, or, if it is base64, as a line after `data:;base64,`.

    Example: bindery tokens create-secret-key --output secret.key
    """
    import base64

    key = new_secret_key(algorithm)
    content = base64.b64encode(key) if as_base64 else key
    if output is not None:
        _create(output, content, SECRET_MODE)
        return
    if not as_base64 and sys.stdout.isatty():
        raise BadRequest("a key of bytes is not written to a terminal: pass --output FILE, or --base64")
    sys.stdout.flush()
    sys.stdout.buffer.write(content + (b"\n" if as_base64 else b""))


@app.command("create-key-pair")
def create_key_pair(
    output_private_key: Annotated[
        str, typer.Option("--output-private-key", metavar="FILE", help="File to create for the private key.")
    ],
    output_public_key: Annotated[
        str, typer.Option("--output-public-key", metavar="FILE", help="File to create for the public key.")
    ],
    algorithm: Algorithm = "RS256",
    as_pem: Annotated[bool, typer.Option("--pem", help="Write PEM instead of DER.")] = False,
) -> None:
    """Create a private key, which signs tokens, and its public key, which verifies them.

    Services need only the public key: `file:///path`, or, with --pem, also as part of a file of keys.

    Example: bindery tokens create-key-pair -a ES256 --output-private-key private.key --output-public-key public.key
    """
    private, public = new_key_pair(algorithm, as_pem=as_pem)
    for file in (output_private_key, output_public_key):
        if Path(file).exists():
            raise AlreadyExists("the file exists; a key is never replaced", file=file)
    _create(output_private_key, private, SECRET_MODE)
    _create(output_public_key, public, PUBLIC_MODE)


@app.command("create")
def create(
    subject: Annotated[str, typer.Option("-s", "--subject", metavar="ROLE", help="Role that the token names.")],
    secret_key: SecretKey = None,
    private_key_file: Annotated[
        str | None,
        typer.Option("-pk", "--private-key", metavar="FILE", help="File of the private key: a path, or file:///path."),
    ] = None,
    expiry_time: Annotated[
        str | None,
        typer.Option(
            "-e", "--expiry-time", metavar="DURATION", help="Time until it expires, as 1h, 3d or 5y; default: never."
        ),
    ] = None,
    algorithm: AnyAlgorithm = None,
    header: Annotated[
        list[str] | None,
        typer.Option("-hs", "--headers", metavar="NAME=VALUE", help="Further header, such as kid=NAME; repeatable."),
    ] = None,
    audience: Annotated[
        list[str] | None,
        typer.Option("--audience", metavar="NAME", help="Service that accepts the token; repeatable; default: any."),
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="File to create; default: stdout.")
    ] = None,
) -> None:
    """Create a token that names a role.

    Example: bindery tokens create --private-key private.key --subject alice --expiry-time 30d --output alice.token
    """
    if not is_subject(subject):
        raise BadRequest("the role must consist of at most 256 printable characters")
    if (secret_key is None) == (private_key_file is None):
        raise BadRequest("pass exactly one of --secret-key and --private-key")
    key = _secret(secret_key) if secret_key is not None else _private(str(private_key_file))
    headers = {}
    for text in header or ():
        name, equals, value = text.partition("=")
        if not equals or name in ("", "alg", "typ", "crit"):
            raise BadRequest("a header has the form NAME=VALUE, and is none of alg, typ and crit", given=name)
        headers[name] = value
    expires_at_s = None if expiry_time is None else int(time.time()) + _seconds(expiry_time)
    audiences = audience[0] if audience and len(audience) == 1 else audience
    token = sign(
        key, subject=subject, expires_at_s=expires_at_s, audience=audiences or None, algorithm=algorithm, header=headers
    )
    if output is None:
        print(token.decode())
    else:
        _create(output, token + b"\n", SECRET_MODE)


@app.command("show")
def show(from_stdin: FromStdin = False, token_file: FromFile = None, as_json: AsJson = False) -> None:
    """Show what a token contains, without verifying it.

    Example: bindery tokens show --token-file alice.token
    """
    header, claims = unverified(_token(from_stdin, token_file))
    text = [json.dumps(header), "---", json.dumps(claims)]
    emit({"header": header, "claims": claims}, text, as_json=as_json)


@app.command("validate")
def validate(
    from_stdin: FromStdin = False,
    token_file: FromFile = None,
    secret_key: SecretKey = None,
    public_key_file: Annotated[
        str | None,
        typer.Option("-pk", "--public-key", metavar="FILE", help="File of public keys: a path, or file:///path."),
    ] = None,
    algorithm: AnyAlgorithm = None,
    audience: Annotated[
        str | None, typer.Option("--audience", metavar="NAME", help="Audience that the service is configured with.")
    ] = None,
) -> None:
    """Verify a token with the rules of the services, and print its claims.

    The exit code is 1 if it is not valid; the error has the reason.

    Example: bindery tokens validate --token-file alice.token --public-key public.key
    """
    if (secret_key is None) == (public_key_file is None):
        raise BadRequest("pass exactly one of --secret-key and --public-key")
    keys = _keys(str(secret_key or public_key_file))
    if secret_key is None and any(key.is_secret for key in keys):
        raise BadRequest("the file of --public-key has a secret key; pass it as --secret-key")
    if algorithm is not None:
        keys = [key for key in keys if algorithm in key.algorithms]
        if not keys:
            raise BadRequest(f"no key of the file is for {_known(algorithm)}")
    token = _token(from_stdin, token_file)
    if algorithm is not None and unverified(token)[0].get("alg") != algorithm:
        raise BadRequest(f"the token is not signed with {algorithm}")
    SignedTokens(keys, audience=audience).verify(token, now_s=time.time())
    print_json(unverified(token)[1])


def _create(file: str, content: bytes, mode: int) -> None:
    """Create a file with `mode`. Raises AlreadyExists: the key or token in an existing file may be in use."""
    try:
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError:
        raise AlreadyExists("the file exists; a key or token is never replaced", file=file) from None
    except OSError as error:
        raise BadRequest(f"cannot create the file: {error.strerror}", file=file) from error
    with os.fdopen(opened, "wb") as stream:
        os.fchmod(opened, mode)
        stream.write(content)


def _keys(setting: str) -> list[Key]:
    if setting[:5].lower() == "data:":
        raise BadRequest("keys are not passed in command lines, which every user can read: name a file")
    path, parse = key_file(setting)
    return FollowedFile(path, parse, what="the file of keys").value


def _secret(setting: str) -> Key:
    key = _keys(setting)[0]
    if not key.is_secret:
        raise BadRequest("the file of --secret-key has a public key, which cannot sign; pass --private-key")
    return key


def _private(setting: str) -> Key:
    if setting[:5].lower() == "data:":
        raise BadRequest("keys are not passed in command lines, which every user can read: name a file")
    path, _ = key_file(setting)
    return FollowedFile(path, private_key, what="the file of the private key").value


def _token(from_stdin: bool, token_file: str | None) -> bytes:
    if from_stdin == (token_file is not None):
        raise BadRequest("pass exactly one of --stdin and --token-file")
    if token_file is not None:
        return read_token(token_file).encode()
    return sys.stdin.read().strip().encode()


def _known(algorithm: str) -> str:
    if algorithm not in ALGORITHMS:
        raise BadRequest(f"the algorithm is one of {', '.join(ALGORITHMS)}", given=algorithm)
    return algorithm


def _seconds(duration: str) -> int:
    """Return the seconds of a duration such as `1h`. Raises BadRequest."""
    number, unit = duration[:-1], duration[-1:].lower()
    if not number.isascii() or not number.isdigit() or unit not in UNITS_S or not 0 < int(number[:9]) < 10**6:
        raise BadRequest("a duration has the form NUMBER and s, m, h, d, w or y, such as 30d", given=duration)
    return int(number) * UNITS_S[unit]
