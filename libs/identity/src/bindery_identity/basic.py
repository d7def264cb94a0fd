"""Names and passwords of clients: files of Apache's `htpasswd`, which Pulsar's basic authentication reads, too.

    name:$apr1$salt$hash        MD5 of Apache, `htpasswd -m`
    name:{SHA}base64            SHA-1 without salt, `htpasswd -s`

Other forms are refused when the file is read: bcrypt (`htpasswd -B`), because no library for it is installed;
crypt(3), because it uses only eight characters of a password; and clear text. Empty lines and lines that begin with #
are ignored.

Hashes are compared in constant time. A refusal takes the same time for an unknown name and for a wrong password, also
of a name with {SHA}: each costs one hash of $apr1$, about 2 ms, so callers on an event loop use a thread unless
`remembers`. A verified password is remembered as a digest under the stored hash as its key. Neither names' passwords
nor hashes appear in an error or a repr. Source: htpasswd(1), apr_md5.c's published algorithm, Pulsar's
AuthenticationProviderBasic.
"""

import base64
import binascii
import hashlib
import hmac
import re
from typing import Final

from bindery_core.errors import BadRequest, Unauthorized

from bindery_identity.tokens import is_subject

PASSWORD_SIZE_MAX: Final = 256
"""Maximum bytes of a password; a longer one is refused."""
_APR1: Final = re.compile(r"\$apr1\$([./0-9A-Za-z]{1,8})\$([./0-9A-Za-z]{22})")
_ALPHABET: Final = b"./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ROUNDS: Final = 1000
_UNKNOWN: Final = "$apr1$........$......................"
"""Stored hash against which the password of an unknown name is compared."""


class Passwords:
    """The names and hashes of one file. Raises BadRequest with the number of a line that cannot be used."""

    def __init__(self, content: bytes) -> None:
        self._hashes: dict[str, str] = {}
        self._remembered: dict[str, bytes] = {}
        for number, line in enumerate(content.splitlines(), start=1):
            text = line.strip().decode("utf-8", "replace")
            if not text or text.startswith("#"):
                continue
            name, _, stored = text.partition(":")
            if not is_subject(name) or "\ufffd" in name:
                raise BadRequest("the name of a client must be printable text", line=number)
            if name in self._hashes:
                raise BadRequest("a client is listed twice", line=number)
            _check_form(stored, number)
            self._hashes[name] = stored
        if not self._hashes:
            raise BadRequest("no password is configured")

    def verify(self, name: str, password: bytes) -> str:
        """Return the client's name. Raises Unauthorized if it is unknown or the password is wrong.

        Different threads may call it at the same time.
        """
        if len(password) > PASSWORD_SIZE_MAX:
            raise Unauthorized("wrong name or password")
        if self.remembers(name, password):
            return name
        stored = self._hashes.get(name, _UNKNOWN)
        if not _matches(stored, password) or name not in self._hashes:
            raise Unauthorized("wrong name or password")
        self._remembered[name] = _digest(stored, password)
        return name

    def remembers(self, name: str, password: bytes) -> bool:
        """Return whether the password was right before, which takes no time worth mentioning."""
        digest = _digest(self._hashes.get(name, _UNKNOWN), password)
        return len(password) <= PASSWORD_SIZE_MAX and hmac.compare_digest(self._remembered.get(name, b""), digest)


def _check_form(stored: str, number: int) -> None:
    if _APR1.fullmatch(stored):
        return
    if stored.startswith("{SHA}"):
        try:
            if len(base64.b64decode(stored[5:], validate=True)) == hashlib.sha1(usedforsecurity=False).digest_size:
                return
        except (binascii.Error, ValueError):
            pass
        raise BadRequest("a {SHA} hash must be base64 of 20 bytes", line=number)
    kind = "bcrypt is not supported" if stored.startswith("$2") else "crypt and clear text are not safe"
    raise BadRequest(f"the password has no supported form ({kind}); write the line with `htpasswd -m`", line=number)


def _digest(stored: str, password: bytes) -> bytes:
    return hmac.digest(stored.encode(), password, "sha256")


def _matches(stored: str, password: bytes) -> bool:
    if stored.startswith("{SHA}"):
        digest = hashlib.sha1(password, usedforsecurity=False).digest()
        is_right = hmac.compare_digest(base64.b64encode(digest), stored[5:].encode())
        if not is_right:
            _matches(_UNKNOWN, password)  # a refusal must not be faster than that of an unknown name
        return is_right
    _, _, salt, expected = stored.split("$")
    return hmac.compare_digest(_apr1(password, salt.encode()), expected.encode())


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _apr1(password: bytes, salt: bytes) -> bytes:
    """Return the 22 characters of the hash: MD5 of many mixtures of password and salt."""
    inner = _md5(password + salt + password)
    text = password + b"$apr1$" + salt
    text += (inner * (len(password) // len(inner) + 1))[: len(password)]
    bits = len(password)
    while bits:
        text += b"\0" if bits & 1 else password[:1]
        bits >>= 1
    digest = _md5(text)
    for turn in range(_ROUNDS):
        mixture = password if turn & 1 else digest
        if turn % 3:
            mixture += salt
        if turn % 7:
            mixture += password
        mixture += digest if turn & 1 else password
        digest = _md5(mixture)
    characters = bytearray()
    for places in ((0, 6, 12), (1, 7, 13), (2, 8, 14), (3, 9, 15), (4, 10, 5), (11,)):
        value = int.from_bytes(bytes(digest[place] for place in places))
        for _ in range(4 if len(places) == 3 else 2):
            characters.append(_ALPHABET[value & 63])
            value >>= 6
    return bytes(characters)
