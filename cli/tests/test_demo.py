"""The checks of the demo detect each broken guarantee."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def load_demo() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "demo.py"
    spec = importlib.util.spec_from_file_location("bindery_demo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


demo = load_demo()
Messages = list[dict[str, Any]]


def message(producer: int, sequence: int, *, entry: int, digest: str | None = None) -> dict[str, Any]:
    digest = digest or f"digest-{producer}-{sequence}"
    properties = {"producer": str(producer), "sequence": str(sequence), "sha256": digest}
    return {"message_id": f"1:{entry}:-1:-1", "properties": properties, "sha256": digest}


def history() -> tuple[Any, Messages]:
    """A history of two producers with three messages each, without loss."""
    record = demo.Record()
    received = []
    for entry, (producer, sequence) in enumerate([(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 2)]):
        record.sent[producer, sequence] = f"digest-{producer}-{sequence}"
        record.acknowledged[producer, sequence] = f"1:{entry}:-1:-1"
        received.append(message(producer, sequence, entry=entry))
    return record, received


def test_a_correct_history_is_good() -> None:
    assert demo.judge(*history()).is_good


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (lambda received: received.pop(2), "lost"),
        (lambda received: received[1].update(sha256="other"), "changed"),
        (lambda received: received.__setitem__(slice(2, 4), received[3:1:-1]), "out_of_order"),
        (lambda received: received.append(message(0, 1, entry=9)), "doubled"),
        (lambda received: received.append(message(0, 7, entry=9)), "invented"),
        (lambda received: received.append(received[0]), "invented"),
        (lambda received: received.append({"message_id": "1:9", "properties": {}, "sha256": ""}), "invented"),
    ],
    ids=["lost", "changed", "out of order", "doubled", "never sent", "one id twice", "no properties"],
)
def test_each_broken_guarantee_is_detected(fault: Callable[[Messages], object], seen: str) -> None:
    record, received = history()
    fault(received)
    verdict = demo.judge(record, received)
    assert not verdict.is_good
    assert getattr(verdict, seen)


def test_a_repeated_request_may_be_stored_twice() -> None:
    record, received = history()
    record.repeated.add((0, 1))
    received.append(message(0, 1, entry=9))
    assert demo.judge(record, received).is_good


def test_files_become_messages_of_bounded_size_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PART_SIZE_MAX", 10)
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(bytes(range(25)))
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "c").write_bytes(b"cache")
    (pieces,) = demo.find_pieces(tmp_path, producers=1, with_caches=False, limit=None)
    assert [(p.name, p.part, p.size, p.sequence) for p in pieces] == [
        ("a", 0, 0, 0),
        ("b", 0, 10, 1),
        ("b", 1, 10, 2),
        ("b", 2, 5, 3),
    ]
    assert b"".join(piece.read() for piece in pieces) == bytes(range(25))


def test_small_pieces_are_sent_together_in_order(tmp_path: Path) -> None:
    small, large = demo.SMALL_SIZE_MAX, demo.SMALL_SIZE_MAX + 1
    sizes = [1, 0, large, small, *[1] * demo.LINES_MAX]
    pieces = [demo.Piece(0, i, tmp_path, "x", 0, 0, size) for i, size in enumerate(sizes)]
    groups = list(demo.group(pieces))
    assert [len(group) for group in groups] == [2, 1, demo.LINES_MAX, 1]
    assert [piece for group in groups for piece in group] == pieces
