"""Apache Pulsar's `pulsar tokens`, unmodified, and `bindery tokens`: both and brokers accept what one of them creates.

All commands of Pulsar run in one JVM, and ours in this process.
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from bindery.tokens.commands import app
from bindery_core.errors import Unauthorized
from bindery_identity.keys import key_file, private_key
from bindery_identity.principal import Method, Principal
from bindery_identity.tokens import sign, unverified
from bindery_kit.access.authentication_settings import AuthenticationSettings
from bindery_kit.admin.access import once
from bindery_metadata.stores.embedded import die_with_parent, find_java
from typer.testing import CliRunner

from e2e.interop.jars import class_path

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

HERE: Final = Path(__file__).resolve().parent
SECRET: Final = ("HS256", "HS384", "HS512")
PAIR: Final = ("RS256", "ES256", "ES384", "ES512")
"""Without the other ones of RSA: Pulsar makes keys of 3,072 and 4,096 bits for them, which takes long."""
SUBJECT: Final = "alice"
HOUR_S: Final = 3600


class Refused(Exception):
    """A tool refused a command. The text is what it wrote."""


Run = Callable[..., str]
"""Run a command and return its output. Raises Refused."""


@pytest.fixture(scope="module")
def pulsar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    jars = class_path(HERE / "pom.xml", [HERE / "Tokens.java"])
    words = [str(find_java()), "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", jars, "Tokens"]
    log = tmp_path_factory.mktemp("pulsar-tokens") / "log"
    with log.open("wb") as errors:
        child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=die_with_parent,
        )

    def run(*words: str) -> str:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(words) + "\n")
        child.stdin.flush()
        line = child.stdout.readline()
        assert line, log.read_text()
        answer = json.loads(line)
        if answer["status"]:
            raise Refused(answer["err"])
        return str(answer["out"]).strip()

    yield run
    child.kill()
    child.wait()


@pytest.fixture(scope="module")
def ours() -> Run:
    def run(*words: str) -> str:
        result = CliRunner().invoke(app, list(words))
        if result.exit_code:
            raise Refused(str(result.exception))
        return result.stdout.strip()

    return run


@pytest.fixture
def tools(pulsar: Run, ours: Run) -> dict[str, Run]:
    return {"pulsar": pulsar, "bindery": ours}


@dataclass
class Keys:
    """Files of one key: what signs, what verifies, and the options for them."""

    algorithm: str
    signs: Path
    verifies: Path

    @property
    def to_sign(self) -> list[str]:
        option = "-sk" if self.algorithm in SECRET else "-pk"
        return [option, f"file://{self.signs}", "-a", self.algorithm]

    @property
    def to_verify(self) -> list[str]:
        option = "-sk" if self.algorithm in SECRET else "-pk"
        return [option, f"file://{self.verifies}", "-a", self.algorithm]

    def admits(self, token: str) -> Principal:
        """Return the principal at a broker that has the key. Raises Unauthorized."""
        auth = AuthenticationSettings(tokens_keys_file=f"file://{self.verifies}")
        authenticator = auth.authenticator(now_s=time.time, follow=once)
        assert authenticator is not None
        return authenticator.by_headers([(b"authorization", b"Bearer " + token.encode())])


def create(tool: Run, algorithm: str, folder: Path, *, options: tuple[str, ...] = ()) -> Keys:
    if algorithm in SECRET:
        tool("create-secret-key", "-a", algorithm, "-o", str(folder / "secret"), *options)
        return Keys(algorithm, folder / "secret", folder / "secret")
    private, public = folder / "private", folder / "public"
    files = ("--output-private-key", str(private), "--output-public-key", str(public))
    tool("create-key-pair", "-a", algorithm, *files, *options)
    return Keys(algorithm, private, public)


def validate(tool: Run, keys: Keys, token: str, folder: Path) -> dict[str, Any]:
    """Return the claims that a tool prints for a valid token. Raises Refused."""
    file = folder / "token"
    file.write_text(token)
    # Pulsar prints the claims in its own form, {sub=alice, exp=1}; that they are valid is what counts.
    told = tool("validate", *keys.to_verify, "-f", str(file))
    assert SUBJECT in told
    return unverified(token.encode())[1]


@pytest.mark.parametrize("algorithm", [*SECRET, *PAIR])
@pytest.mark.parametrize("owner", ["pulsar", "bindery"])
def test_keys_and_tokens_of_both(tools: dict[str, Run], tmp_path: Path, owner: str, algorithm: str) -> None:
    """Keys of one tool: both sign with them, both accept the tokens of both, and so does a broker."""
    keys = create(tools[owner], algorithm, tmp_path)
    for signer in tools.values():
        token = signer("create", *keys.to_sign, "-s", SUBJECT, "-e", "1h")
        assert unverified(token.encode())[0]["alg"] == algorithm
        for verifier in tools.values():
            claims = validate(verifier, keys, token, tmp_path)
            assert claims["sub"] == SUBJECT
            assert abs(claims["exp"] - time.time() - HOUR_S) < HOUR_S / 2
        admitted = keys.admits(token)
        assert (admitted.role, admitted.method) == (SUBJECT, Method.TOKEN)


@pytest.mark.parametrize("owner", ["pulsar", "bindery"])
def test_a_secret_key_in_base64(tools: dict[str, Run], tmp_path: Path, owner: str) -> None:
    """A file of base64 is a key of its decoded bytes for ours; Pulsar takes it as `data:;base64,`."""
    keys = create(tools[owner], "HS256", tmp_path, options=("-b",))
    text = f"data:;base64,{keys.signs.read_text().strip()}"
    token = tools["pulsar"]("create", "-sk", text, "-s", SUBJECT)
    (tmp_path / "line").write_text(text + "\n")
    auth = AuthenticationSettings(tokens_keys_file=str(tmp_path / "line")).authenticator(now_s=time.time, follow=once)
    assert auth is not None
    assert auth.by_headers([(b"authorization", f"Bearer {token}".encode())]).role == SUBJECT


@pytest.mark.parametrize("algorithm", ["HS256", "RS256", "ES256"])
def test_what_both_refuse(tools: dict[str, Run], tmp_path: Path, algorithm: str) -> None:
    """A token of another key, one whose claims were changed, and an expired one."""
    (tmp_path / "other").mkdir()
    keys, other = (create(tools["pulsar"], algorithm, folder) for folder in (tmp_path, tmp_path / "other"))
    foreign = tools["pulsar"]("create", *other.to_sign, "-s", SUBJECT)
    good = tools["pulsar"]("create", *keys.to_sign, "-s", SUBJECT)
    head, _, signature = good.split(".")
    changed = ".".join((head, foreign.split(".")[1][:-4] + "AAAA", signature))
    expired = sign(signing_key(keys), subject=SUBJECT, expires_at_s=int(time.time()) - HOUR_S, algorithm=algorithm)
    for token in (foreign, changed, expired.decode()):
        for tool in tools.values():
            with pytest.raises(Refused):
                validate(tool, keys, token, tmp_path)
        with pytest.raises(Unauthorized):
            keys.admits(token)


def signing_key(keys: Keys) -> Any:
    if keys.algorithm in SECRET:
        _, parse = key_file(f"file://{keys.signs}")
        return parse(keys.signs.read_bytes())[0]
    return private_key(keys.signs.read_bytes())


def test_a_token_of_ours_with_pss(tools: dict[str, Run], tmp_path: Path) -> None:
    """Pulsar verifies PS256. It signs with RS256 by every RSA key of this size, whatever the option says."""
    keys = create(tools["pulsar"], "PS256", tmp_path)
    token = tools["bindery"]("create", *keys.to_sign, "-s", SUBJECT)
    assert unverified(token.encode())[0]["alg"] == "PS256"
    assert validate(tools["pulsar"], keys, token, tmp_path)["sub"] == SUBJECT
    assert keys.admits(token).role == SUBJECT


@pytest.mark.parametrize("signer", ["pulsar", "bindery"])
def test_headers(tools: dict[str, Run], tmp_path: Path, signer: str) -> None:
    """A token that names its key (`kid`) is accepted by both."""
    keys = create(tools[signer], "RS256", tmp_path)
    token = tools[signer]("create", *keys.to_sign, "-s", SUBJECT, "-hs", "kid=first")
    assert unverified(token.encode())[0]["kid"] == "first"
    for tool in tools.values():
        assert validate(tool, keys, token, tmp_path)["sub"] == SUBJECT
