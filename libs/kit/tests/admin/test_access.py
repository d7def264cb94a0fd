"""Tokens of requests to an admin API, and the file of secrets."""

from pathlib import Path

import pytest
from bindery_core.auth_token import TOKEN_SIZE_MAX
from bindery_core.errors import BadRequest, Unauthorized
from bindery_kit.admin.access import Access, read_secrets


class FakeVerifier:
    """Accepts the token `good` and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[bytes, float]] = []

    def verify(self, token: bytes, *, now_s: float) -> str:
        self.calls.append((token, now_s))
        if token != b"good":
            raise Unauthorized("wrong token")
        return "operator"


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


@pytest.mark.parametrize("verifier", [FakeVerifier(), None])
def test_a_request_without_a_token_is_told_to_send_one(verifier: FakeVerifier | None) -> None:
    with pytest.raises(Unauthorized, match="this request needs a token"):
        access(verifier).check([(b"host", b"authorization")])


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
    with pytest.raises(Unauthorized, match="no tokens are configured: set --secrets"):
        access(None).check([(b"authorization", b"Bearer good")])


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
