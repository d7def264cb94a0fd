import os
import threading
from pathlib import Path

import pytest
from bindery_core.errors import BadRequest
from bindery_identity.followed import SIZE_MAX, FollowedFile, FollowedFiles


def number(content: bytes) -> int:
    return int(content)


def replace(path: Path, content: str) -> None:
    """Replace a file by rename, as editors and Kubernetes do."""
    new = path.with_name("new")
    new.write_text(content)
    new.rename(path)


def test_a_file_that_does_not_change_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    reads = []
    followed = FollowedFile(str(path), reads.append)
    assert not followed.poll()
    assert not followed.poll()
    assert reads == [b"1"]


def test_a_changed_file_replaces_the_value(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    followed = FollowedFile(str(path), number)
    replace(path, "2")
    assert followed.value == 1
    assert followed.poll()
    assert (followed.value, followed.failure) == (2, None)


def test_a_write_in_place_replaces_the_value(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    os.utime(path, ns=(0, 0))
    followed = FollowedFile(str(path), number)
    path.write_text("2")
    assert followed.poll()
    assert followed.value == 2


def test_a_bad_file_keeps_the_last_good_value_until_it_is_corrected(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    followed = FollowedFile(str(path), number)
    replace(path, "not a number")
    assert not followed.poll()
    assert followed.value == 1
    assert followed.failure is not None
    assert not followed.poll()
    replace(path, "3")
    assert followed.poll()
    assert (followed.value, followed.failure) == (3, None)


def test_a_removed_file_keeps_the_last_good_value(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    followed = FollowedFile(str(path), number)
    path.unlink()
    assert not followed.poll()
    assert followed.value == 1
    assert "No such file" in (followed.failure or "")
    path.write_text("1")
    assert followed.poll()
    assert followed.failure is None


def test_a_link_to_another_folder_is_noticed(tmp_path: Path) -> None:
    """A Secret that Kubernetes mounts changes by exchanging a link."""
    for name, content in (("a", "1"), ("b", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(content)
    link = tmp_path / "link"
    link.symlink_to("a")
    followed = FollowedFile(str(link / "file"), number)
    other = tmp_path / "other"
    other.symlink_to("b")
    other.rename(link)
    assert followed.poll()
    assert followed.value == 2


def test_files_that_belong_together_change_together(tmp_path: Path) -> None:
    def pair(contents: object) -> str:
        first, second = contents  # type: ignore[misc]
        if first != second:
            raise BadRequest("the files do not belong together")
        return str(first.decode())

    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.write_text("1")
    followed = FollowedFiles([str(path) for path in paths], pair)
    replace(paths[0], "2")
    assert not followed.poll()
    assert (followed.value, followed.failure) == (
        "1",
        f"the files do not belong together: path={paths[0]},{paths[1]}",
    )
    replace(paths[1], "2")
    assert followed.poll()
    assert (followed.value, followed.failure) == ("2", None)


@pytest.mark.parametrize("content", [None, b"x" * (SIZE_MAX + 1)])
def test_the_constructor_refuses_a_missing_or_too_large_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadRequest, match=str(path)):
        FollowedFile(str(path), number)


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """`--token-file <(command)` of a shell is a pipe: reading it again would block."""
    reader, writer = os.pipe()
    os.write(writer, b"7")
    os.close(writer)
    followed = FollowedFile(f"/dev/fd/{reader}", number)
    os.close(reader)
    assert followed.value == 7


def test_the_value_is_not_in_the_repr(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("secret")
    assert "secret" not in repr(FollowedFile(str(path), bytes))


def test_any_exception_of_a_loader_keeps_the_old_content(tmp_path: Path) -> None:
    class Odd(Exception):
        pass

    def load(content: bytes) -> int:
        if not content.isdigit():
            raise Odd(f"secret {content!r}")
        return int(content)

    path = tmp_path / "file"
    path.write_text("1")
    followed = FollowedFile(str(path), load, what="the file of keys")
    path.write_text("secret content")
    assert not followed.poll()
    assert (followed.value, followed.failure) == (1, "the file of keys cannot be used: Odd")
    path.write_text("234")
    assert followed.poll()
    assert (followed.value, followed.failure, followed.replacements) == (234, None, 1)


def test_one_thread_reads_and_another_does_not_wait_for_it(tmp_path: Path) -> None:
    reading, may_end, reads = threading.Event(), threading.Event(), []

    def load(content: bytes) -> int:
        reads.append(content)
        if len(reads) > 1:
            reading.set()
            assert may_end.wait(30)
        return int(content)

    path = tmp_path / "file"
    path.write_text("1")
    followed = FollowedFile(str(path), load)
    path.write_text("234")
    other = threading.Thread(target=followed.poll)
    other.start()
    assert reading.wait(30)
    assert not followed.poll()
    assert (followed.value, len(reads)) == (1, 2)
    may_end.set()
    other.join()
    assert (followed.value, followed.replacements) == (234, 1)
