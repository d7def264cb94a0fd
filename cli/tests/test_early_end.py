"""A service that receives SIGTERM during its imports ends at once, also as the first process of a container."""

import signal
import subprocess
import sys

import pytest

STOPPED_AT_ITS_FIRST_IMPORT = """
import os, signal, sys
pid, os.getpid = os.getpid(), lambda: {pid}
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the kernel does for pid 1

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {{"asyncio", "gc", "structlog", "bindery_client", "bindery_core"}}:
            os.kill(pid, signal.SIGTERM)
            sys.exit("still here")

sys.meta_path.insert(0, Stop())
import {module}
"""
SERVICES = ["bindery_bookie.__main__", "bindery_broker.main", "bindery_auditor.main"]


def code(module: str, *, pid: int) -> int:
    script = STOPPED_AT_ITS_FIRST_IMPORT.format(module=module, pid=pid)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60).returncode


@pytest.mark.parametrize("module", SERVICES)
def test_the_first_process_of_a_container_ends_before_it_imports_anything_else(module: str) -> None:
    assert code(module, pid=1) == 128 + signal.SIGTERM


def test_any_other_process_keeps_the_handler_that_it_has() -> None:
    assert code(SERVICES[0], pid=2) == 1
