"""A broker in this process that stores messages once by producer and sequence id, and fails as it is told."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

CUT = 0
"""As a status: store nothing and cut the connection."""
CUT_AFTER = 1
"""As a status: store the messages and cut the connection."""


class FakeBroker:
    """`fail`: takes the number of the POST request and returns the status of its answer; 200: it succeeds."""

    def __init__(self) -> None:
        self.messages: dict[str, list[dict[str, Any]]] = {}
        """The messages of each topic, in order."""
        self.last: dict[tuple[str, str], int] = {}
        """Highest sequence id by topic and producer."""
        self.partitions: dict[str, int] = {}
        """Number of partitions of the partitioned topics."""
        self.fail: Callable[[int], int] = lambda _number: 200
        self.posts = 0
        self.duplicates = 0
        self._lock = threading.Lock()
        broker = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                *_, topic, part, producer = urlsplit(self.path).path.split("/")
                if producer == "partitions":
                    count = broker.partitions.get(unquote(part), 0)
                    self.answer(*((200, {"partitions": count}) if count else (404, {"code": "no_such_topic"})))
                    return
                with broker._lock:
                    last = broker.last.get((unquote(topic), unquote(producer)), -1)
                    exists = unquote(topic) in broker.messages
                self.answer(*((200, {"last_sequence_id": last}) if exists else (404, {"code": "no_such_topic"})))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                parts = urlsplit(self.path)
                topic = unquote(parts.path.split("/")[-2])
                with broker._lock:
                    status = broker.fail(broker.posts)
                    broker.posts += 1
                    if status in (200, CUT_AFTER):
                        producer = parse_qs(parts.query)["producer"][0]
                        count = broker.store(topic, producer, [json.loads(line) for line in body.splitlines()])
                if status in (CUT, CUT_AFTER):
                    self.close_connection = True
                elif status == 200:
                    self.answer(200, {"message_ids": ["1:0:-1:-1"] * count})
                else:
                    self.answer(status, {"detail": "made up", "code": "made_up", "facts": {"index": 0}})

            def answer(self, status: int, content: dict[str, Any]) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def store(self, topic: str, producer: str, lines: list[dict[str, Any]]) -> int:
        stored = self.messages.setdefault(topic, [])
        for line in lines:
            if line["sequence_id"] <= self.last.get((topic, producer), -1):
                self.duplicates += 1
                continue
            self.last[topic, producer] = line["sequence_id"]
            stored.append({**line, "producer": producer})
        return len(lines)

    def payloads(self, topic: str) -> list[str]:
        return [message["payload"] for message in self.messages.get(topic, [])]

    def __enter__(self) -> "FakeBroker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
