"""QuietLog: one line per second and event, with the number of lines left out."""

import pytest
from bindery_kit.observability import quiet_log
from bindery_kit.observability.quiet_log import QuietLog


def test_each_event_is_logged_at_most_once_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, dict[str, object]]] = []

    class Recorder:
        def warning(self, event: str, **fields: object) -> None:
            lines.append((event, fields))

        def error(self, event: str, **fields: object) -> None:
            lines.append((f"error {event}", fields))

    monkeypatch.setattr(quiet_log, "get_logger", lambda _: Recorder())
    now = [100.0]
    log = QuietLog("test", clock=lambda: now[0])
    for peer in range(5):
        log.warning("closed", peer=peer)
    log.warning("refused")
    assert lines == [("closed", {"peer": 0}), ("refused", {})]
    now[0] += 1.0
    log.warning("closed", peer=9)
    assert lines[2:] == [("closed", {"peer": 9, "left_out": 4})]
    now[0] += 10.0
    log.warning("closed", peer=10)
    assert lines[3:] == [("closed", {"peer": 10})]
    for number in range(3):
        log.error("broken", number=number)
    now[0] += 1.0
    log.error("broken", number=3)
    assert lines[4:] == [("error broken", {"number": 0}), ("error broken", {"number": 3, "left_out": 2})]
