"""Secrets come from files, the environment or the terminal, never from the command line."""

from pathlib import Path

import pytest
from bindery.common.credentials import read_password, read_token
from bindery_core.errors import BadRequest


def test_a_password_comes_from_the_file_before_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BINDERY_LEDGER_PASSWORD", raising=False)
    assert read_password(None) == b""
    monkeypatch.setenv("BINDERY_LEDGER_PASSWORD", "from variable")
    assert read_password(None) == b"from variable"
    file = tmp_path / "password"
    for content in (b" secret ", b" secret \n", b" secret \r\n"):
        file.write_bytes(content)
        assert read_password(str(file)) == b" secret ", "only one line end is removed"


def test_the_prompt_for_a_password_needs_a_terminal() -> None:
    with pytest.raises(BadRequest, match="needs a terminal"):
        read_password("-")


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.touch()
    with pytest.raises(BadRequest, match=r"cannot read the password file: .*missing"):
        read_password(str(missing))
    with pytest.raises(BadRequest, match=r"cannot read the token file: .*missing"):
        read_token(str(missing))
    with pytest.raises(BadRequest, match="the token file is empty"):
        read_token(str(empty))


def test_the_token_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    """A service accepts each line of a file of secrets; the command sends one."""
    file = tmp_path / "tokens"
    file.write_bytes(b"\n  the new token \r\nthe-old-token\n")
    assert read_token(str(file)) == "the new token"
    file.write_bytes(b"\xff\xff\n")
    with pytest.raises(BadRequest, match="cannot read the token file"):
        read_token(str(file))
