"""The token that a client presents is the first line of its file, and follows the file."""

from pathlib import Path

import pytest
from bindery_core.errors import BadRequest
from bindery_identity.token_file import TokenFile


def test_the_token_is_the_first_line_and_follows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("\n  one \r\nolder\n")
    file = TokenFile(str(path))
    assert file.newest() == b"one"
    (tmp_path / "next").write_text("two\n")
    (tmp_path / "next").rename(path)
    assert file.newest() == b"two"
    path.write_text(" \n")
    assert file.newest() == b"two", "an empty file leaves the last good token"
    assert file.failure is not None
    assert "the token file is empty" in file.failure


def test_a_file_without_a_token_is_refused_and_no_token_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("\n\n")
    with pytest.raises(BadRequest, match="the token file is empty"):
        TokenFile(str(path))
    with pytest.raises(BadRequest, match="cannot read the token file: No such file"):
        TokenFile(str(tmp_path / "none"))
    path.write_text("s3cret")
    assert "s3cret" not in repr(TokenFile(str(path)))
