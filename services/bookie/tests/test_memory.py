"""A short run of `bench/memory.py`: resident memory of a real bookie with demanding clients, against its budget."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench/memory.py"


@pytest.mark.integration
def test_resident_memory_stays_within_the_budget() -> None:
    """Slow readers, catch-up scans and writers run at the same time, with a small budget that unbounded use exceeds."""
    words = ["--seconds", "4", "--fill-mib", "40", "--budget-mib", "160", "--slow-readers", "15"]
    found = subprocess.run(
        [sys.executable, str(BENCH), *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    result = json.loads(found.stdout)
    assert result["rss_most_mib"] <= result["limit_mib"] == 184.0
    assert result["samples"] > 20
    assert result["adds_under_load"] > 100
    assert result["reads_of_scans"] > 100
