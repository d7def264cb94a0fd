"""The start of a session: it prints nothing, and an interrupt leaves no JVM behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

START = """
from bindery_spark.session import session
print(session(1, "start", with_sources=False).range(3).count())
"""


def members(group: int) -> list[str]:
    """Command lines of the processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            words = stat.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
@pytest.mark.parametrize("delay_s", [0.0, 0.7])
def test_an_interrupt_while_java_starts_leaves_no_java_behind(delay_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", START], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        began = time.monotonic()
        while not any("PythonGatewayServer" in line or "pyspark-shell" in line for line in members(process.pid)):
            assert time.monotonic() - began < 60
            time.sleep(0.01)
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, words = process.communicate(timeout=60)  # a process that holds stderr open delays this
        assert process.returncode != 0
        assert b"KeyboardInterrupt" in words
        while members(process.pid):
            assert time.monotonic() - began < 60, members(process.pid)
            time.sleep(0.1)
    finally:
        if process.poll() is None or members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_start_prints_neither_log_levels_nor_warnings_of_the_jvm() -> None:
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout == "3\n"
    assert "log level" not in done.stderr
    assert "WARNING" not in done.stderr
