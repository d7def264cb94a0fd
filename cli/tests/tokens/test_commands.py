"""`bindery tokens`: what one command creates, the others and the services accept."""

import json
import stat
from pathlib import Path

import pytest
from bindery.common import exit_codes
from bindery.tokens.commands import _seconds
from bindery_core.errors import BadRequest
from command import bindery


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def ok(*arguments: str, stdin: str | None = None) -> str:
    found = bindery("tokens", *arguments, stdin=stdin)
    assert found.returncode == 0, found.stderr
    return found.stdout


def refused(*arguments: str, stdin: str | None = None) -> str:
    found = bindery("tokens", *arguments, stdin=stdin)
    assert found.returncode in (exit_codes.FAILURE, exit_codes.USAGE), found.stdout
    assert found.stdout == ""
    return found.stderr


def test_a_token_of_a_secret_key_is_valid(tmp_path: Path) -> None:
    key, token = tmp_path / "secret.key", tmp_path / "token"
    ok("create-secret-key", "--output", str(key))
    assert (len(key.read_bytes()), mode(key)) == (32, 0o600)
    ok("create", "-sk", f"file://{key}", "-s", "alice", "-e", "1h", "--output", str(token))
    assert mode(token) == 0o600
    claims = json.loads(ok("validate", "-sk", f"file://{key}", "-f", str(token)))
    assert claims["sub"] == "alice"
    assert json.loads(ok("show", "--stdin", "--json", stdin=token.read_text()))["header"] == {
        "alg": "HS256",
        "typ": "JWT",
    }
    header, line, shown = ok("show", "-f", str(token)).splitlines()
    assert (json.loads(header)["alg"], line, json.loads(shown)["sub"]) == ("HS256", "---", "alice")
    other = tmp_path / "other.key"
    ok("create-secret-key", "-a", "HS512", "-b", "-o", str(other))
    assert bindery("tokens", "validate", "-sk", str(other), "-f", str(token)).returncode == exit_codes.FAILURE
    told = refused("validate", "-sk", str(other), "-f", str(token))
    assert "wrong signature" in told
    assert token.read_text().strip() not in told


@pytest.mark.parametrize(("algorithm", "form"), [("RS256", []), ("ES256", []), ("ES384", ["--pem"])])
def test_a_token_of_a_private_key_is_valid_by_the_public_key(tmp_path: Path, algorithm: str, form: list[str]) -> None:
    private, public = tmp_path / "private.key", tmp_path / "public.key"
    ok(
        "create-key-pair",
        "-a",
        algorithm,
        *form,
        "--output-private-key",
        str(private),
        "--output-public-key",
        str(public),
    )
    assert (mode(private), mode(public)) == (0o600, 0o644)
    token = ok("create", "-pk", str(private), "-s", "bob", "--audience", "brokers", "-hs", "kid=main").strip()
    assert json.loads(ok("show", "--stdin", "--json", stdin=token))["header"]["kid"] == "main"
    check = ("validate", "--stdin", "-pk", f"file://{public}")
    assert json.loads(ok(*check, "--audience", "brokers", stdin=token)) == {"sub": "bob", "aud": "brokers"}
    assert "has none configured" in refused(*check, stdin=token)
    assert "no key of the file" in refused(*check, "-a", "HS256", stdin=token)
    assert "cannot sign" in refused("create", "-sk", f"file://{public}", "-s", "bob")


def test_no_file_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("something")
    for arguments in (
        ("create-secret-key", "-o", str(file)),
        ("create-key-pair", "--output-private-key", str(tmp_path / "new"), "--output-public-key", str(file)),
    ):
        assert "never replaced" in refused(*arguments)
    assert file.read_text() == "something"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["create", "-s", "x"], "exactly one of --secret-key and --private-key"),
        (["create", "-s", "x", "-sk", "data:;base64,AAAA"], "every user can read"),
        (["create", "-s", "x", "-pk", "data:;base64,AAAA"], "every user can read"),
        (["create", "-s", "a\u2028b", "-sk", "/k"], "printable"),
        (["create", "-s", "x", "-sk", "/none/such"], "No such file"),
        (["create-secret-key", "-a", "RS256"], "one of HS256"),
        (["create-key-pair", "-a", "HS256", "--output-private-key", "a", "--output-public-key", "b"], "one of RS256"),
        (["show"], "exactly one of --stdin and --token-file"),
        (["show", "--stdin"], "not a signed token"),
        (["validate", "--stdin"], "exactly one of --secret-key and --public-key"),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_pass(arguments: list[str], told: str) -> None:
    assert told in refused(*arguments)


def test_a_token_is_no_argument() -> None:
    """Command lines can be read by every user of the machine."""
    assert bindery("tokens", "show", "a.b.c").returncode == 2


def test_durations_have_the_units_of_pulsar() -> None:
    assert [_seconds(text) for text in ("5s", "2m", "1h", "3d", "1w", "5y", "1H")] == [
        5, 120, 3600, 259_200, 604_800, 157_680_000, 3600
    ]  # fmt: skip
    for text in ("", "h", "1", "-1h", "1.5h", "0s", "1x", "9999999d", "\u0661h"):
        with pytest.raises(BadRequest):
            _seconds(text)
