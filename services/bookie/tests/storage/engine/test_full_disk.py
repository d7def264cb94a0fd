"""Full disks on real, small file systems: a short run of `bench/full_disk.py`, and LevelDB."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[5]
BENCH = ROOT / "bench/full_disk.py"


@pytest.mark.integration
def test_a_bookie_recovers_by_itself_when_a_full_disk_has_space_again() -> None:
    """The disk is filled by another process (with a start on the full disk) or by the bookie; any write may fail."""
    found = subprocess.run(
        [sys.executable, str(BENCH), "--cycles", "3", "--bookie", "enospc", "--restart-every", "3", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    summary = json.loads(found.stdout)
    assert summary["cycles"] == 3
    assert summary["restarts"] == 1
    assert summary["acknowledged"] > 500
    assert summary["reads"] > summary["acknowledged"]
    assert set(summary["refused"]["enospc"]) <= {"READ_ONLY", "TOO_MANY_REQUESTS"}


_LEVELDB = textwrap.dedent(
    """
    import os, subprocess, sys, tempfile
    from bindery_bookie.storage.io.disk import is_no_space
    from bindery_bookie.storage.io.kv import LevelDbKV

    directory = tempfile.mkdtemp()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "bindery", directory], check=True)
    path, junk = directory + "/index", directory + "/junk"

    def fill(leave=0):
        free = os.statvfs(directory)
        with open(junk, "ab", buffering=0) as file:
            left = free.f_bavail * free.f_frsize - leave
            while left > 0:
                try:
                    left -= file.write(bytes(min(left, 65536)))
                except OSError:
                    return

    def rows(prefix, count):
        return [(b"%s%06d" % (prefix, n), bytes([n % 251]) * 900) for n in range(count)]

    def refused(work):
        try:
            work()
        except OSError as error:
            assert is_no_space(error) and path in str(error), error
        else:
            raise AssertionError("it was not refused")

    has_room = [True]
    kv = LevelDbKV(path, write_buffer_size=65536, has_room=lambda: has_room[0])
    kv.write_batch(rows(b"a", 20), sync=True)
    known = dict(rows(b"a", 20))
    for turn in range(6):
        # Even rounds: no space, so the log fails. Odd rounds: some space, so tables and compactions fail half-way.
        fill(leave=200_000 * (turn % 2))
        failed = 0
        for attempt in range(12):
            try:
                kv.write_batch(rows(b"t%d" % turn, 100), sync=True)
            except OSError as error:
                assert is_no_space(error) or "no disk space" in str(error), error
                assert path in str(error) or "no disk space" in str(error), error
                failed += 1
                has_room[0] = False
        assert failed
        assert all(kv.get(key) == value for key, value in known.items()), "reads continue"
        assert len(list(kv.scan(start=b"a", stop=b"b"))) == 20
        os.unlink(junk)
        has_room[0] = True
        batch = rows(b"w%d" % turn, 30)
        kv.write_batch(batch, sync=True)
        known.update(batch)
        kv.write_batch([], [key for key, _ in rows(b"t%d" % turn, 100)], sync=True)
    kv.close()
    fill()
    refused(lambda: LevelDbKV(path))
    os.unlink(junk)
    kv = LevelDbKV(path)
    assert all(kv.get(key) == value for key, value in known.items()), "writes after a failure are stored"
    assert len(list(kv.scan(start=b"", stop=b"z"))) == len(known)
    kv.close()
    print("held", len(known))
    """
)


@pytest.mark.integration
def test_leveldb_recovers_after_writes_without_space() -> None:
    """If the store were not reopened, it would acknowledge writes that the next start cannot read."""
    how = "unshare --map-root-user --mount"
    found = subprocess.run(
        [*how.split(), sys.executable, "-c", _LEVELDB], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.stdout == "held 200\n", found.stderr
