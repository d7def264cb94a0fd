"""An OpenID identity provider on a local https port with a CA of its own."""

import asyncio
import contextlib
import json
import ssl
from typing import Any

import jwt
from bindery_broker.access.openid_keys import DISCOVERY_PATH
from bindery_simulation.certificates.authority import Authority
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

PAIR = ec.generate_private_key(ec.SECP256R1())


def key_set(*names: str) -> bytes:
    jwk = ECAlgorithm.to_jwk(PAIR.public_key(), as_dict=True)
    return json.dumps({"keys": [{**jwk, "kid": name} for name in names]}).encode()


def openid_token(**claims: object) -> str:
    """Return a token that the key `a` signed."""
    return jwt.encode(claims, PAIR, "ES256", headers={"kid": "a"})


class Provider:
    """An identity provider. `answers`: path -> (status, further headers, body)."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        certificate, key = authority.issue("issuer")
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(certificate, key)
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.asked: list[str] = []
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.url = f"https://localhost:{self._server.sockets[0].getsockname()[1]}/realm"
        self.discover()
        self.answer("/keys", key_set("a"))

    def discover(self, **members: Any) -> None:
        document = {"issuer": self.url, "jwks_uri": self.url.removesuffix("/realm") + "/keys", **members}
        self.answer(f"/realm{DISCOVERY_PATH}", json.dumps(document).encode())

    def answer(self, path: str, body: bytes, status: int = 200, **headers: str) -> None:
        self.answers[path] = (status, headers, body)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode()
            self.asked.append(path)
            status, headers, body = self.answers.get(path, (404, {}, b""))
            lines = [f"HTTP/1.1 {status} x", f"content-length: {len(body)}", "connection: close"]
            lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            await writer.drain()
        writer.close()

    def stop(self) -> None:
        self._server.close()
