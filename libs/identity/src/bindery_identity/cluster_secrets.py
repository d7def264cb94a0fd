"""Create and renew the secrets of a cluster in one directory: certificates, keys, tokens and passwords.

| file                   | content                                                                    | mode |
|------------------------|----------------------------------------------------------------------------|------|
| ca.crt, ca.key         | certificate authority of the cluster                                       | 0644, 0600 |
| NAME.crt, NAME.key     | certificate of a server or a client, and its key                           | 0644, 0600 |
| NAME.pem               | both in one file, for servers such as ZooKeeper's                          | 0600 |
| tokens.key, tokens.pub | key pair (ES256) that signs and verifies tokens                            | 0600, 0644 |
| ROLE.token             | token that names a role                                                    | 0600 |
| zookeeper.credentials  | `user:password` for ZooKeeper's scheme `digest`                            | 0600 |

`create` can be repeated at any time, and after a crash. What exists and is usable is kept. A certificate or a token is
made again

- if less than a third of its validity is left,
- if the authority, or the key pair, did not sign it,
- if it lacks a host that the caller names.

A renewed certificate keeps its key, so that the two files of a pair match at every moment. The authority, the key pair
and the password are never replaced, because all members of a cluster trust them; docs/rotation.md has the steps.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from bindery_core.errors import BadRequest, Unauthorized

from bindery_identity.authority import Authority, facts, new_private_key, normal_host
from bindery_identity.keys import parse_keys, private_key
from bindery_identity.new_keys import new_key_pair, public_key_pem
from bindery_identity.secret_directory import SecretDirectory
from bindery_identity.tokens import SignedTokens, sign, unverified

AUTHORITY: Final = "ca"
TOKENS: Final = "tokens"
ZOOKEEPER_CREDENTIALS: Final = "zookeeper.credentials"
ZOOKEEPER_USER: Final = "bindery"
PASSWORD_BYTES: Final = 32
TOKEN_ALGORITHM: Final = "ES256"  # noqa: S105 (not a password)
DAYS_DEFAULT: Final = 365
"""Days that a certificate or a token is valid."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


T = TypeVar("T")


class Action(StrEnum):
    """What happened to a file."""

    KEPT = "kept"
    CREATED = "created"
    RENEWED = "renewed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The secrets of a cluster. Raises BadRequest for names that cannot be names of files.

    `servers`: names of certificates with the hosts of each. `clients`: common names of certificates of clients.
    `roles`: roles with a token. `days`: validity of certificates and tokens.
    """

    servers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    clients: Sequence[str] = ()
    roles: Sequence[str] = ()
    zookeeper: bool = False
    days: int = DAYS_DEFAULT

    def __post_init__(self) -> None:
        names = (*self.servers, *self.clients)
        for name in (*names, *self.roles):
            if not _NAME.fullmatch(name):
                raise BadRequest(
                    "the name of a certificate or role must consist of at most 64 letters, digits, dots, hyphens and "
                    "underscores, and begin with a letter, a digit or an underscore, because it is the name of a file",
                    given=name,
                )
        for name in names:
            if name in (AUTHORITY, TOKENS):
                raise BadRequest("the name is that of other files of the directory; choose another", given=name)
        if len(set(names)) < len(names):
            raise BadRequest("each certificate must have a name of its own")
        for name, hosts in self.servers.items():
            if not hosts:
                raise BadRequest("the certificate of a server needs at least one host", name=name)
        if not 1 <= self.days <= 36_500:
            raise BadRequest("the validity must be 1 to 36500 days", given=self.days)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A file after `create`. `expires_at_s`: seconds since 1970; None: never. `why`: the reason of a renewal."""

    file: Path
    action: Action
    expires_at_s: float | None = None
    why: str = ""


def create(path: Path, wanted: Wanted, *, now_s: float, authority: bool = True) -> list[Made]:
    """Create what is missing in the directory, renew what is near its end, and return all files of `wanted`.

    `authority`: create one if there is none. Raises BadRequest if the directory or a file in it cannot be used.
    """
    directory = SecretDirectory(path)
    with directory.locked():
        made: list[Made] = []
        if authority or wanted.servers or wanted.clients:
            signer, of_authority = _authority(directory, now_s, may_create=authority)
            made += of_authority
            for name, hosts in wanted.servers.items():
                made += _certificate(directory, signer, name, hosts, wanted.days, now_s)
            for name in wanted.clients:
                made += _certificate(directory, signer, name, (), wanted.days, now_s)
        if wanted.roles:
            made += _tokens(directory, wanted.roles, wanted.days, now_s)
        if wanted.zookeeper:
            made.append(_zookeeper(directory))
        return made


def _authority(directory: SecretDirectory, now_s: float, *, may_create: bool) -> tuple[Authority, list[Made]]:
    certificate, key = directory.read(f"{AUTHORITY}.crt"), directory.read(f"{AUTHORITY}.key")
    files = [directory.file(f"{AUTHORITY}.crt"), directory.file(f"{AUTHORITY}.key")]
    action = Action.KEPT
    if certificate is None:  # a key without a certificate signed nothing yet
        if not may_create:
            raise BadRequest(
                "the directory has no certificate authority; run `bindery certificates create-ca` first",
                directory=str(directory.path),
            )
        made = Authority.create(f"Bindery CA {secrets.token_hex(4)}", now_s=now_s)  # noqa: TID251 (unpredictable)
        directory.write(f"{AUTHORITY}.key", made.key_pem, secret=True)
        directory.write(f"{AUTHORITY}.crt", made.certificate_pem, secret=False)
        certificate, key, action = made.certificate_pem, made.key_pem, Action.CREATED
    if key is None:
        raise BadRequest(
            "the key of the certificate authority is missing, so that no certificate can be made or renewed; restore "
            "the file, or begin with a new directory and move the cluster to the new authority (docs/rotation.md)",
            missing=str(files[1]),
        )
    signer = _in_file(files[0], partial(Authority.load, certificate, key))
    directory.restrict(f"{AUTHORITY}.key")
    expires_at_s = facts(certificate).expires_at_s
    if expires_at_s <= now_s:
        raise BadRequest(
            "the certificate of the authority has expired; begin with a new directory and move the cluster to the new "
            "authority (docs/rotation.md)",
            file=str(files[0]),
        )
    return signer, [
        Made(file=files[0], action=action, expires_at_s=expires_at_s),
        Made(file=files[1], action=action),
    ]


def _certificate(
    directory: SecretDirectory, signer: Authority, name: str, hosts: Sequence[str], days: int, now_s: float
) -> list[Made]:
    hosts = list(dict.fromkeys(normal_host(host) for host in hosts))
    certificate, key = directory.read(f"{name}.crt"), directory.read(f"{name}.key")
    certificate_file, key_file = directory.file(f"{name}.crt"), directory.file(f"{name}.key")
    of_key = Made(file=key_file, action=Action.KEPT if key else Action.CREATED)
    if key is None:
        key = new_private_key()
        directory.write(f"{name}.key", key, secret=True)
    else:
        directory.restrict(f"{name}.key")
    why = ""
    if certificate is not None:
        why = _in_file(certificate_file, partial(_outdated, signer, certificate, key, hosts, now_s))
    action = Action.CREATED if certificate is None else Action.RENEWED if why else Action.KEPT
    if certificate is None or why:
        certificate = signer.issue(key, common_name=name, hosts=hosts, now_s=now_s, lifetime_s=days * 86_400)
        directory.write(f"{name}.crt", certificate, secret=False)
    expires_at_s = facts(certificate).expires_at_s
    made = [Made(file=certificate_file, action=action, expires_at_s=expires_at_s, why=why), of_key]
    if hosts:
        both, before = key + certificate, directory.read(f"{name}.pem")
        if before != both:
            directory.write(f"{name}.pem", both, secret=True)
        made.append(Made(
            file=directory.file(f"{name}.pem"),
            action=Action.CREATED if before is None else Action.KEPT if before == both else Action.RENEWED,
            expires_at_s=expires_at_s,
        ))  # fmt: skip
    return made


def _outdated(signer: Authority, certificate: bytes, key: bytes, hosts: Sequence[str], now_s: float) -> str:
    """Return why a certificate must be replaced; empty if it need not be."""
    found = facts(certificate)
    if not signer.has_issued(certificate, key):
        return "it is of another authority or key"
    if missing := [host for host in hosts if host not in found.hosts]:
        return f"it lacks {', '.join(missing)}"
    return "it is near its end" if found.is_near_its_end(now_s) else ""


def _tokens(directory: SecretDirectory, roles: Sequence[str], days: int, now_s: float) -> list[Made]:
    private, public = directory.read(f"{TOKENS}.key"), directory.read(f"{TOKENS}.pub")
    private_file, public_file = directory.file(f"{TOKENS}.key"), directory.file(f"{TOKENS}.pub")
    action = Action.KEPT
    if public is None and private is not None:
        loaded = _in_file(private_file, partial(private_key, private))
        public = public_key_pem(loaded.material)
        directory.write(f"{TOKENS}.pub", public, secret=False)
    elif public is None:
        private, public = new_key_pair(TOKEN_ALGORITHM, as_pem=True)
        directory.write(f"{TOKENS}.key", private, secret=True)
        directory.write(f"{TOKENS}.pub", public, secret=False)
        action = Action.CREATED
    if private is None:
        raise BadRequest(
            "the key that signs tokens is missing, so that no token can be made or renewed; restore the file, or "
            "remove the file of the public key for a new pair, which makes all tokens invalid",
            missing=str(private_file),
            public=str(public_file),
        )
    directory.restrict(f"{TOKENS}.key")
    signer = _in_file(private_file, partial(private_key, private))
    verifier = _in_file(public_file, lambda: SignedTokens(parse_keys(public)))
    try:
        verifier.verify(sign(signer, subject="test"), now_s=now_s)
    except Unauthorized:
        raise BadRequest(
            "the file of public keys lacks the key of the private key: add it (`openssl pkey -in tokens.key -pubout`), "
            "or remove both files for a new pair, which makes all tokens invalid",
            file=str(public_file),
        ) from None
    made = [Made(file=private_file, action=action), Made(file=public_file, action=action)]
    for role in dict.fromkeys(roles):
        name = f"{role}.token"
        before = directory.read(name)
        why = "" if before is None else outdated_token(verifier, before, role, now_s)
        content = before
        if content is None or why:
            expires_at_s = int(now_s) + days * 86_400
            content = sign(signer, subject=role, expires_at_s=expires_at_s, issued_at_s=int(now_s)) + b"\n"
            directory.write(name, content, secret=True)
        else:
            directory.restrict(name)
        expires = unverified(content.strip())[1].get("exp")
        made.append(Made(
            file=directory.file(name),
            action=Action.CREATED if before is None else Action.RENEWED if why else Action.KEPT,
            expires_at_s=None if expires is None else float(expires),
            why=why,
        ))  # fmt: skip
    return made


def outdated_token(verifier: SignedTokens, content: bytes, role: str, now_s: float) -> str:
    """Return why a token must be replaced; empty if it need not be."""
    token = content.strip()
    try:
        bearer = verifier.verify(token, now_s=now_s)
    except Unauthorized as error:
        return error.message
    if bearer.subject != role:
        return "it names another role"
    claims = unverified(token)[1]
    if "exp" not in claims:
        return ""
    begins_at_s = float(claims.get("iat", now_s))
    return "it is near its end" if claims["exp"] - now_s < (claims["exp"] - begins_at_s) / 3 else ""


def _in_file(file: Path, load: Callable[[], T]) -> T:
    """Return what `load` returns. Raises its BadRequest with the name of the file."""
    try:
        return load()
    except BadRequest as error:
        raise BadRequest(error.message, **{**error.facts, "file": str(file)}) from None


def _zookeeper(directory: SecretDirectory) -> Made:
    file = directory.file(ZOOKEEPER_CREDENTIALS)
    content = directory.read(ZOOKEEPER_CREDENTIALS)
    if content is not None:
        if b":" not in content:
            raise BadRequest(
                "the file of ZooKeeper's credentials must have lines of the form user:password", file=str(file)
            )
        directory.restrict(ZOOKEEPER_CREDENTIALS)
        return Made(file=file, action=Action.KEPT)
    line = f"{ZOOKEEPER_USER}:{secrets.token_hex(PASSWORD_BYTES)}\n"  # noqa: TID251 (unpredictable)
    directory.write(ZOOKEEPER_CREDENTIALS, line.encode(), secret=True)
    return Made(file=file, action=Action.CREATED)
