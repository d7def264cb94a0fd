"""Print a history as a sequence chart: time, sender -> receiver, message, and the state after the message.

For example:

    0.000 writer   -> b1        add 0                                    b1:{0}
    0.000 b1       -> writer    stored 0                                 lac=-1 pending=1
    0.000 recovery -> b2        read 0, fence                            b2:{} FENCED
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

from bindery_core.ids import BookieId
from bindery_core.wire.messages import Status

from bindery_simulation.protocol.bookie import Bookie
from bindery_simulation.protocol.endpoint import Message
from bindery_simulation.protocol.ledger import Ledger

MESSAGE_WIDTH = 46
"""Width of the message column in characters."""


class Scene(Protocol):
    """The state that a chart shows."""

    @property
    def now(self) -> float: ...
    @property
    def bookies(self) -> Mapping[BookieId, Bookie]: ...
    @property
    def ledger(self) -> Ledger: ...


class SequenceChart:
    """Collects the lines. A chart does not influence a history."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def digest(self) -> str:
        """Return the SHA-256 of the text. Equal digests mean equal histories."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    def play(self, scene: Scene, message: Message) -> None:
        """Deliver `message` and add its line."""
        source, target, text = describe(message)
        place = len(self.lines)
        try:
            message[0](message)
        finally:
            state = _state(scene, message)
            self.lines.insert(place, self._line(scene.now, source, target, text, state))

    def vanished(self, scene: Scene, message: Message, why: str) -> None:
        source, target, text = describe(message)
        self.lines.append(self._line(scene.now, source, target, text, f"({why})", arrow="-x"))

    def note(self, scene: Scene, text: str) -> None:
        self.lines.append(f"{scene.now:9.3f} * {text}")

    @staticmethod
    def _line(now: float, source: str, target: str, text: str, state: str, *, arrow: str = "->") -> str:
        return f"{now:9.3f} {source:<10} {arrow} {target:<10} {text:<{MESSAGE_WIDTH}} {state}".rstrip()


def describe(message: Message) -> tuple[str, str, str]:
    """Return sender, receiver and text of a message."""
    method, client, bookie_id, first, second = message
    name = client.name
    match method.__name__:
        case "to_add":
            ids = ",".join(map(str, first[0]))
            return name, bookie_id, f"{'recovery add' if second else 'add'} {ids}"
        case "from_add":
            text = ", ".join(f"{_status(answer.status, 'stored')} {answer.entry_id}" for answer in first)
            return bookie_id, name, text
        case "to_read":
            return name, bookie_id, f"read {_entry(first)}{', fence' if second[0] else ''}"
        case "from_read":
            lac = "" if first.body is None or len(first.body) < 24 else f" (lac {_lac_in(first.body)})"
            return bookie_id, name, f"{_status(first.status, 'found')} {_entry(first.entry_id)}{lac}"
        case "to_poll":
            return name, bookie_id, f"long poll above lac {first}"
        case "from_poll":
            found = "nothing" if first.body is None else f"entry {first.entry_id}"
            return bookie_id, name, f"{found}, lac {first.max_lac}"
        case "to_read_lac":
            return name, bookie_id, "read lac"
        case "from_read_lac":
            return bookie_id, name, f"lac {_status(first.status, 'told')}"
        case "to_write_lac":
            return name, bookie_id, f"write lac {first}"
        case "lost":
            return bookie_id, name, "connection lost"
        case "meta_read":
            return name, "metadata", "read"
        case "meta_write":
            return name, "metadata", f"compare-and-set at v{second[1]}: {_metadata(second[0])}"
        case "meta_delete":
            return name, "metadata", f"delete at v{second}"
        case "meta_done":
            return "metadata", name, "done"
        case other:
            return name, name, f"{other.replace('_', ' ')}"


def _entry(entry_id: int) -> str:
    return "last" if entry_id < 0 else str(entry_id)


def _status(status: int, good: str) -> str:
    return good if status == 0 else Status(status).name


def _lac_in(body: bytes) -> int:
    return int.from_bytes(body[16:24], "big", signed=True)


def _metadata(metadata: Any) -> str:
    segments = " ".join(f"{s.first_entry_id}:({','.join(s.ensemble)})" for s in metadata.segments)
    end = f" last={metadata.last_entry_id}" if metadata.state.name == "CLOSED" else ""
    return f"{metadata.state.name}{end} {segments}"


def _state(scene: Scene, message: Message) -> str:
    name = message[0].__name__
    if name.startswith("to_"):
        return scene.bookies[message[2]].describe()
    if name.startswith("meta_") and name != "meta_done":
        if scene.ledger.is_deleted:
            return "deleted"
        return f"v{scene.ledger.version} {_metadata(scene.ledger.metadata)}"
    return str(message[1].describe())
