"""The authority and the key of tokens of a cluster on Kubernetes, and how both are replaced without a refused request.

They are the data of one Secret, which only the jobs of the chart read:

| key                              | content                                                                        |
|----------------------------------|--------------------------------------------------------------------------------|
| ca.crt, ca.key, tokens.key       | in use: they sign certificates and tokens                                      |
| next-ca.crt, next-ca.key,        | the next ones, while all members learn to trust them                           |
| next-tokens.key                  |                                                                                |
| old-ca.crt, old-tokens.pub       | the previous ones, which are trusted until nobody uses them                    |
| stage                            | stable, announced, signed                                                      |
| settled_from                     | when all Secrets had the state of that stage, in seconds since 1970; empty:    |
|                                  | they may not have it yet                                                       |
| zookeeper                        | `user:password` of ZooKeeper, which is never replaced here                     |

| stage     | trusted          | signs | then                                                       |
|-----------|------------------|-------|------------------------------------------------------------|
| stable    | current          | current | `announced`, on request, or if the authority is near its end |
| announced | current and next | current | `signed`, when all pods have the new files                 |
| signed    | current and old  | current, which was next | `stable`, when all pods have the new files |
"""

import secrets
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from bindery_core.errors import BadRequest
from bindery_identity.authority import Authority, facts
from bindery_identity.cluster_secrets import PASSWORD_BYTES, TOKEN_ALGORITHM, ZOOKEEPER_USER
from bindery_identity.keys import private_key
from bindery_identity.new_keys import new_key_pair, public_key_pem

Data = dict[str, bytes]
REQUIRED: Final = ("ca.crt", "ca.key", "tokens.key", "zookeeper")


class Stage(StrEnum):
    """How far a replacement is; see the table above."""

    STABLE = "stable"
    ANNOUNCED = "announced"
    SIGNED = "signed"


def stage(state: Mapping[str, bytes]) -> Stage:
    """Raises BadRequest for a state of another program."""
    found = state.get("stage", b"stable").decode(errors="replace")
    try:
        return Stage(found)
    except ValueError:
        raise BadRequest(
            "the Secret of the authority has an unknown stage; use the version of bindery that wrote it, or restore it",
            stage=found,
        ) from None


def created(state: Mapping[str, bytes], *, now_s: float) -> Data:
    """Return the state with everything that a new cluster needs. Raises BadRequest if only a part of it is there."""
    present = [key for key in REQUIRED if state.get(key)]
    if len(present) == len(REQUIRED):
        return dict(state)
    if present:
        raise BadRequest(
            "the Secret of the authority is incomplete; restore it from a backup. If there is none, delete the data of "
            "all Secrets of the release, and move ZooKeeper to the new password (docs/security.md)",
            missing=", ".join(key for key in REQUIRED if key not in present),
        )
    password = secrets.token_hex(PASSWORD_BYTES)
    return {**_pair("", now_s), "stage": b"stable", "zookeeper": f"{ZOOKEEPER_USER}:{password}\n".encode()}


def advanced(state: Mapping[str, bytes], *, now_s: float, settle_s: float, replace: bool) -> Data:
    """Return the next state; the same one if nothing is to be done yet.

    `settle_s`: how long pods take to get new files. `replace`: begin a replacement, if none is in progress.
    """
    at = stage(state)
    if at is Stage.STABLE:
        if not replace and not facts(state["ca.crt"]).is_near_its_end(now_s):
            return dict(state)
        return {**state, **_pair("next-", now_s), "stage": b"announced", "settled_from": b""}
    since = state.get("settled_from")
    if not since or now_s - float(since) < settle_s:
        return dict(state)
    if at is Stage.ANNOUNCED:
        kept = {key: value for key, value in state.items() if not key.startswith("next-")}
        return {
            **kept,
            "old-ca.crt": state["ca.crt"],
            "old-tokens.pub": _public(state["tokens.key"]),
            **{key: state[f"next-{key}"] for key in ("ca.crt", "ca.key", "tokens.key")},
            "stage": b"signed",
            "settled_from": b"",
        }
    kept = {key: value for key, value in state.items() if not key.startswith("old-")}
    return {**kept, "stage": b"stable", "settled_from": b""}


def trusted_authorities(state: Mapping[str, bytes]) -> bytes:
    """Return the certificates that all members trust (PEM)."""
    return b"".join(state[key] for key in ("ca.crt", "next-ca.crt", "old-ca.crt") if key in state)


def trusted_keys(state: Mapping[str, bytes]) -> bytes:
    """Return the public keys that verify tokens (PEM), the one that signs first."""
    return (
        _public(state["tokens.key"])
        + (_public(state["next-tokens.key"]) if "next-tokens.key" in state else b"")
        + state.get("old-tokens.pub", b"")
    )


def _pair(prefix: str, now_s: float) -> Data:
    authority = Authority.create(f"Bindery CA {secrets.token_hex(4)}", now_s=now_s)
    key, _ = new_key_pair(TOKEN_ALGORITHM, as_pem=True)
    return {
        f"{prefix}ca.crt": authority.certificate_pem,
        f"{prefix}ca.key": authority.key_pem,
        f"{prefix}tokens.key": key,
    }


def _public(key: bytes) -> bytes:
    return public_key_pem(private_key(key).material)
