"""System errors of LevelDB keep their error number, from which the final error message derives its advice."""

import errno
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from bindery_bookie.storage.io.kv import LevelDbKV
from bindery_kit.observability.last_words import sentence_of

READ_ONLY = textwrap.dedent(
    """
    import subprocess, sys, tempfile
    from bindery_bookie.storage.io.kv import LevelDbKV
    from bindery_kit.observability.last_words import sentence_of

    directory = tempfile.mkdtemp()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "bindery", directory], check=True)
    LevelDbKV(directory + "/index").close()
    subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
    try:
        LevelDbKV(directory + "/index")
    except OSError as error:
        print(error.errno, sentence_of(error))
    """
)


@pytest.mark.integration
def test_the_error_of_a_read_only_directory_advises_a_writable_volume() -> None:
    how = "unshare --map-root-user --mount"
    found = subprocess.run(
        [*how.split(), sys.executable, "-c", READ_ONLY], capture_output=True, text=True, timeout=60, check=False
    )
    number, _, sentence = found.stdout.partition(" ")
    assert number == str(errno.EROFS), found.stderr
    assert "Read-only file system; mount a writable volume there" in sentence


def test_the_error_of_an_index_in_use_advises_to_stop_the_other_process(tmp_path: Path) -> None:
    kv = LevelDbKV(str(tmp_path / "index"))
    code = "import sys; from bindery_bookie.storage.io.kv import LevelDbKV; LevelDbKV(sys.argv[1])"
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "index")], capture_output=True, text=True, timeout=60, check=False
    )
    kv.close()
    assert f"[Errno {errno.EAGAIN}]" in found.stderr.splitlines()[-1]
    error = OSError(errno.EAGAIN, "index does not open", "/x")
    assert sentence_of(error) == (
        "cannot use /x: index does not open; another process uses it: stop that process, or set another directory"
    )
