"""Send messages through the broker, receive them, compare every replica on every bookie, and delete the topic.

Environment: BINDERY_URL, BINDERY_ZOOKEEPER, MESSAGES (number of messages), COPIES (required replicas of each entry);
with TLS, BINDERY_HTTP_CA_FILE (CA of the broker's certificate); with authentication, BINDERY_TOKEN_FILE.
Exit code 0: success. Otherwise the last line has the problem and where to find details. The topic is deleted in both
cases.
"""

import json
import os
import secrets
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

TIMEOUT_S = 50.0
REQUEST_TIMEOUT_S = 30.0
COPIES_WAIT_S = 20.0
"""Maximum time in seconds to wait for all replicas. The last replica of an entry may be pending after the response."""


class Failed(Exception):
    """The test failed. The message has the problem and where to find details."""


@cache
def tls() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=os.environ.get("BINDERY_HTTP_CA_FILE") or None)


def headers() -> dict[str, str]:
    token_file = os.environ.get("BINDERY_TOKEN_FILE")
    credentials = {"Authorization": f"Bearer {Path(token_file).read_text().split()[0]}"} if token_file else {}
    return {"Content-Type": "application/json", **credentials}


def call(method: str, path: str, body: Any = None) -> Any:
    """Send a request to the broker. After 503 or 504, repeat it unless it is a POST, because topics may be moving."""
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    data = None if body is None else json.dumps(body).encode()
    while True:
        request = urllib.request.Request(os.environ["BINDERY_URL"] + path, data=data, method=method, headers=headers())
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S, context=tls()) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            if error.code not in (503, 504) or method == "POST" or time.monotonic() > deadline:
                raise Failed(f"{method} {path} was refused ({error.code}): {said}; see the broker's log") from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise Failed(f"no broker answers at {os.environ['BINDERY_URL']}: {error}") from error
        time.sleep(1)


def produce(topic: str, count: int) -> list[str]:
    sent = [f"message {number} {secrets.token_hex(16)}" for number in range(count)]
    # Each message gets an entry of its own, so that several entries are distributed over the bookies.
    answer = call("POST", f"{topic}/messages?batch=false", [{"payload": payload} for payload in sent])
    if len(answer["message_ids"]) != count:
        raise Failed(f"{count} messages were sent, and {len(answer['message_ids'])} ids answered")
    return sent


def consume(topic: str, count: int) -> list[str]:
    received: list[str] = []
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    wanted = {"consumer": "test", "initial": "earliest", "max": 100, "wait_ms": 2000}
    while len(received) < count and time.monotonic() < deadline:
        messages = call("POST", f"{topic}/subscriptions/test/receive", wanted)["messages"]
        if messages:
            call(
                "POST", f"{topic}/subscriptions/test/ack", {"message_ids": [found["message_id"] for found in messages]}
            )
        received += [found["payload"] for found in messages]
    return received


def check_copies(topic: str, copies: int) -> str:
    """Compare all replicas of the topic and return a summary. Raises Failed if a replica is missing or differs."""
    entries = ledgers = 0
    for ledger in call("GET", f"{topic}/internal")["ledgers"]:
        if ledger["entries"]:
            entries += compare(int(ledger["ledgerId"]), entries=int(ledger["entries"]), copies=copies)
            ledgers += 1
    if not entries:
        raise Failed("the topic has no entries, though its messages were answered")
    return f"{entries} entries of {ledgers} ledgers"


def compare(ledger_id: int, *, entries: int, copies: int) -> int:
    deadline = time.monotonic() + COPIES_WAIT_S
    command = ["bindery", "ledger", "compare", str(ledger_id), "--last", str(entries - 1), "--json"]
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        bad = [line for line in lines if "entry_id" in line and not is_whole(line, copies=copies)]
        if done.returncode == 0 and not bad and len(lines) == entries + 1:
            return entries
        if time.monotonic() > deadline:
            found = "; ".join(map(described, bad[:3])) or done.stderr.strip()
            raise Failed(
                f"ledger {ledger_id} has not {copies} equal copies of each entry: {found}; "
                f"see `bindery ledger compare {ledger_id}` and `bindery recovery status`"
            )
        time.sleep(1)


def is_whole(line: dict[str, Any], *, copies: int) -> bool:
    good = [copy for copy in line["copies"].values() if copy["verdict"] == "good"]
    return line["verdict"] == "agree" and len(good) == copies


def described(line: dict[str, Any]) -> str:
    copies = ", ".join(f"{bookie} {copy['verdict']}" for bookie, copy in line["copies"].items())
    return f"entry {line['entry_id']}: {line['verdict']} ({copies})"


def main() -> None:
    count, copies = int(os.environ["MESSAGES"]), int(os.environ["COPIES"])
    topic = f"/v1/topics/public/default/helm-test-{secrets.token_hex(4)}"
    started = time.monotonic()
    try:
        call("PUT", topic)
        sent = produce(topic, count)
        received = consume(topic, count)
        if received != sent:
            raise Failed(f"{count} messages were sent, {len(received)} received, not the same or in another order")
        compared = check_copies(topic, copies)
    finally:
        call("DELETE", f"{topic}?force=true")
    print(f"{count} messages went through in order; {compared} have {copies} equal copies each; the topic is deleted")
    elapsed = time.monotonic() - started
    if elapsed > TIMEOUT_S:
        raise Failed(f"all is well, and took {elapsed:.0f} s of {TIMEOUT_S:.0f} s: the cluster is overloaded")


if __name__ == "__main__":
    try:
        main()
    except Failed as error:
        sys.exit(f"test failed: {error}")
