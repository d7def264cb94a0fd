"""Lines of the audit log: their form, group writes, failures, and bounds."""

import asyncio
import threading
from pathlib import Path

import pytest
from audit_parts import Clock, lines_of, make_log
from bindery_kit.access import audit_log
from bindery_kit.access.audit_log import VALUE_SIZE_MAX, AuditLogUnavailable
from bindery_kit.access.denial_counts import LINES_PER_ADDRESS_MAX, WINDOW_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


async def test_a_line_is_in_the_file_when_write_returns(path: Path):
    log = make_log(path)
    await log.write("change_started", {"change": log.next_change(), "role": None, "status": 200})
    assert lines_of(path) == [
        {
            "time": "2023-11-14T22:13:20.123Z",
            "service": "broker",
            "event": "change_started",
            "change": log.next_change().rpartition("-")[0] + "-1",
            "role": None,
            "status": 200,
        }
    ]
    await log.close()


async def test_nothing_that_a_client_sends_forges_a_line(path: Path):
    log = make_log(path)
    evil = 'x"}\n{"event":"forged"}\r\u2028\u202e\x00\ud800'
    await log.write("denied", {"path": evil, "resource": {evil: evil}})
    await log.close()
    text = path.read_bytes()
    assert text.count(b"\n") == 1
    assert text.isascii()
    assert lines_of(path)[0]["path"] == evil


async def test_values_are_bounded(path: Path):
    log = make_log(path)
    resource = {f"{n:04}" + "k" * 9_999: "v" * 99_999 for n in range(1_000)}
    await log.write("denied", {"path": "p" * 99_999, "resource": resource, "role": "\u2028" * 99_999})
    await log.close()
    assert len(path.read_bytes()) < 34 * (VALUE_SIZE_MAX + 16) + 6 * VALUE_SIZE_MAX
    assert lines_of(path)[0]["path"] == "p" * (VALUE_SIZE_MAX - 3) + "..."


async def test_lines_that_wait_are_written_together(path: Path, monkeypatch: pytest.MonkeyPatch):
    log = make_log(path)
    sizes: list[int] = []
    append = log._file.append
    monkeypatch.setattr(log._file, "append", lambda lines: (sizes.append(lines.count(b"\n")), append(lines)))
    await asyncio.gather(*(log.write("change_started", {"change": str(n)}) for n in range(50)))
    await log.close()
    assert [line["change"] for line in lines_of(path)] == [str(n) for n in range(50)]
    assert sum(sizes) == 50
    assert len(sizes) <= 2
    assert log.lines["change_started"] == 50


async def test_each_writer_gets_the_failure_and_later_lines_are_written(tmp_path: Path):
    path = tmp_path / "later" / "audit.log"
    log = make_log(path)
    results = await asyncio.gather(*(log.write("change_started", {}) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(one, AuditLogUnavailable) and "No such file" in str(one) for one in results)
    assert log.failures == 3
    path.parent.mkdir()
    await log.write("change_started", {"change": "x"})
    await log.close()
    assert [line["change"] for line in lines_of(path)] == ["x"]
    assert b"bindery_audit_log_failures_total 3\n" in log.render()
    assert b'bindery_audit_log_lines_total{event="change_started"} 1\n' in log.render()


async def test_a_disk_that_hangs_delays_a_line_for_a_bounded_time(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit_log, "WRITE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(audit_log, "WAITING_MAX", 2)
    log = make_log(path)
    free = threading.Event()
    append = log._file.append
    monkeypatch.setattr(log._file, "append", lambda lines: (free.wait(20), append(lines)))
    with pytest.raises(AuditLogUnavailable, match="took no line for"):
        await log.write("change_started", {"change": "1"})
    results = await asyncio.gather(*(log.write("denied", {}) for _ in range(5)), return_exceptions=True)
    assert sum("2 lines wait" in str(one) for one in results) == 3
    monkeypatch.setattr(audit_log, "WRITE_TIMEOUT_S", 20.0)
    free.set()
    await log.close()
    assert len(lines_of(path)) == 3


async def test_denials_are_counted_by_minute(path: Path):
    clock = Clock()
    log = make_log(path, clock)
    for _ in range(LINES_PER_ADDRESS_MAX + 5):
        await log.deny("10.0.0.1", {"status": 401})
    assert len(lines_of(path)) == LINES_PER_ADDRESS_MAX
    assert log.left_out == 5
    clock.now_s += WINDOW_S
    await log.deny("10.0.0.1", {"status": 403})
    await log.close()
    *_, count, last = sorted(lines_of(path), key=lambda line: (line["event"] != "denied", line.get("status", 0)))[-3:]
    events = [line["event"] for line in lines_of(path)]
    assert events.count("denied") == LINES_PER_ADDRESS_MAX + 1
    assert [(line["client"], line["count"]) for line in (count, last) if "count" in line] == [("10.0.0.1", 5)]


async def test_the_end_writes_the_counts_of_the_unfinished_minute(path: Path):
    log = make_log(path)
    for _ in range(LINES_PER_ADDRESS_MAX + 5):
        await log.deny("10.0.0.1", {})
    await log.close()
    await log.close()
    assert lines_of(path)[-1]["event"] == "denials_left_out"
    assert lines_of(path)[-1]["count"] == 5


async def test_a_denial_that_cannot_be_written_is_counted_and_no_error(tmp_path: Path):
    log = make_log(tmp_path / "none" / "audit.log")
    await log.deny("10.0.0.1", {})
    await log.close()
    assert log.failures == 1
