"""Tokens of requests to an admin API, and the file of secrets."""

from pathlib import Path

import pytest
from bindery_core.errors import BadRequest, Unauthorized
from bindery_identity.keys import secret_key
from bindery_identity.tokens import SHARED_SUBJECT, TOKEN_SIZE_MAX, Bearer, sign
from bindery_kit.admin.access import Access, load_verifier, read_keys, read_secrets


class FakeVerifier:
    """Accepts the token `good` and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[bytes, float]] = []

    def verify(self, token: bytes, *, now_s: float) -> Bearer:
        self.calls.append((token, now_s))
        if token != b"good":
            raise Unauthorized("wrong token")
        return Bearer("operator")


def access(verifier: FakeVerifier | None) -> Access:
    return Access(verifier, now_s=lambda: 1234.5, hint="set --secrets")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "header",
    [(b"authorization", b"Bearer good"), (b"Authorization", b"bearer  good "), (b"AUTHORIZATION", b"BEARER good")],
)
def test_a_valid_token_has_a_name(header: tuple[bytes, bytes]) -> None:
    verifier = FakeVerifier()
    assert access(verifier).check([(b"host", b"h"), header, (b"accept", b"*/*")]) == "operator"
    assert verifier.calls == [(b"good", 1234.5)]


def test_a_wrong_token_is_refused_by_the_verifier() -> None:
    with pytest.raises(Unauthorized, match="wrong token"):
        access(FakeVerifier()).check([(b"authorization", b"Bearer bad")])


def test_a_request_without_a_token_is_told_to_send_one() -> None:
    with pytest.raises(Unauthorized, match="this request needs a token"):
        access(FakeVerifier()).check([(b"host", b"authorization")])


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Basic good")],
        [(b"authorization", b"good")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer good"), (b"Authorization", b"Bearer good")],
        [(b"authorization", b"Bearer " + b"x" * (TOKEN_SIZE_MAX - 6))],
    ],
    ids=["basic", "no scheme", "no token", "empty", "twice", "too long"],
)
def test_another_header_is_refused_unseen(headers: list[tuple[bytes, bytes]]) -> None:
    verifier = FakeVerifier()
    with pytest.raises(Unauthorized, match="one header Authorization: Bearer <token> is expected"):
        access(verifier).check(headers)
    assert verifier.calls == []


def test_a_header_of_the_maximum_size_is_checked() -> None:
    verifier = FakeVerifier()
    with pytest.raises(Unauthorized, match="wrong token"):
        access(verifier).check([(b"authorization", b"Bearer " + b"x" * (TOKEN_SIZE_MAX - 7))])
    assert len(verifier.calls) == 1


def test_without_a_verifier_every_token_is_refused_with_the_hint() -> None:
    for headers in ([(b"authorization", b"Bearer good")], []):
        with pytest.raises(Unauthorized, match="no tokens are configured: set --secrets"):
            access(None).check(headers)


def test_a_file_of_secrets_has_one_per_line(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_bytes(b" one \n\n  \ntwo words\r\n\xff\n")
    assert read_secrets(str(file)) == [b"one", b"two words", b"\xff"]
    file.write_bytes(b"")
    assert read_secrets(str(file)) == []


def test_a_missing_file_of_secrets_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "missing")
    with pytest.raises(BadRequest, match="cannot read the file of secrets: No such file") as caught:
        read_secrets(path)
    assert caught.value.facts == {"path": path}


# --- keys -------------------------------------------------------------------------------------------------------------

RAW_KEY = b"\n " + bytes(range(0xE0, 0x100))[:28] + b"\r\n"
"""32 bytes as `pulsar tokens create-secret-key` may write them: blanks and line ends belong to the key."""


@pytest.mark.parametrize("scheme", ["file://", "file:", "FILE://", "file://localhost"])
def test_a_file_url_names_the_raw_bytes_of_one_key(tmp_path: Path, scheme: str) -> None:
    file = tmp_path / "secret key.bin"
    file.write_bytes(RAW_KEY)
    assert read_keys(f"{scheme}{tmp_path}/secret%20key.bin") == [secret_key(RAW_KEY)]


def test_a_plain_path_names_keys_one_per_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b" " + b"k" * 40 + b"\r\n\n" + b"data:;base64," + b"AAAA" * 12 + b"\n")
    assert read_keys(str(file)) == [secret_key(b"k" * 40), secret_key(bytes(36))]
    file.write_bytes(b"data:AAAA\n")
    with pytest.raises(BadRequest, match="data:;base64,") as caught:
        read_keys(str(file))
    assert caught.value.facts == {"path": str(file), "line": 1}


@pytest.mark.parametrize(
    "url", ["file:", "file:relative", "file://host/key", "file:///key?x", "file:///key#x", "file://"]
)
def test_a_url_that_is_no_absolute_path_is_refused(url: str) -> None:
    with pytest.raises(BadRequest, match="must be file:///<absolute path>"):
        read_keys(url)


@pytest.mark.parametrize("path", ["/none/such", "file:///none/such", "file:///none/s%00ch"])
def test_a_missing_file_of_keys_is_named(path: str) -> None:
    with pytest.raises(BadRequest, match="cannot read the file of keys"):
        read_keys(path)


def verifier(secrets: str = "", keys: str = "", audience: str = "") -> object:
    return load_verifier(secrets_file=secrets, keys_file=keys, audience=audience, names=("a.secrets", "a.keys"))


def test_a_verifier_needs_exactly_one_file(tmp_path: Path) -> None:
    for secrets, keys in (("", ""), ("/s", "/k")):
        with pytest.raises(BadRequest, match=r"needs one of a.secrets and a.keys"):
            verifier(secrets, keys)


def test_an_audience_needs_signed_tokens(tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text("a-secret-of-operators")
    with pytest.raises(BadRequest, match=r"set a.keys instead of a.secrets"):
        verifier(str(tmp_path / "secrets"), audience="x")
    found = load_verifier(secrets_file=str(tmp_path / "secrets"), keys_file="", audience="", names=("s", "k"))
    assert found.verify(b"a-secret-of-operators", now_s=0).subject == SHARED_SUBJECT


def test_a_key_of_pulsar_verifies_tokens_of_the_configured_audience(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(RAW_KEY)
    for audience in ("", "bookies"):
        found = load_verifier(secrets_file="", keys_file=f"file://{tmp_path}/key", audience=audience, names=("s", "k"))
        assert found.verify(sign(RAW_KEY, subject="x", audience=audience or None), now_s=0).subject == "x"
        with pytest.raises(Unauthorized, match="audience"):
            found.verify(sign(RAW_KEY, subject="x", audience=None if audience else "bookies"), now_s=0)
