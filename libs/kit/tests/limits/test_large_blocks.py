"""Large blocks of memory are returned when they are freed, in a process of its own because that cannot be undone."""

import ctypes
import subprocess
import sys

import pytest
from bindery_kit.limits import large_blocks
from bindery_kit.limits.large_blocks import return_large_blocks

FREE_IN_THREADS = """
import sys, threading
from bindery_kit.limits.large_blocks import return_large_blocks

def resident_size():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

if sys.argv[1] == "return":
    assert return_large_blocks()
before = resident_size()
threads = []
for _ in range(4):
    def use():
        for _ in range(3):
            block = bytes(16 * 2**20).replace(b"\\0", b"a")
            small = [bytes(3 * 2**20).replace(b"\\0", b"b") for _ in range(4)]
            del block, small
    threads.append(threading.Thread(target=use))
    threads[-1].start()
for thread in threads:
    thread.join()
print(resident_size() - before)
"""


def grown(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", FREE_IN_THREADS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="it measures with /proc")
def test_a_process_takes_the_memory_of_the_blocks_that_exist() -> None:
    assert grown("return") < 4 * 2**20
    assert grown("keep") > 16 * 2**20


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_blocks.ctypes, "CDLL", lambda _: object())
    assert return_large_blocks() is False

    def refuse(_: None) -> ctypes.CDLL:
        raise OSError("made up")

    monkeypatch.setattr(large_blocks.ctypes, "CDLL", refuse)
    assert return_large_blocks() is False
