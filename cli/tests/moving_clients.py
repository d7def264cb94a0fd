"""Clients of two brokers whose URLs and authentication change while they send and receive without a pause.

A client repeats a request that got no answer, 429, 503 or 504 at the other broker, as docs/producers.md says. Any other
error is a failure, and so is a request that is not answered within CALL_TIMEOUT_S.
"""

import asyncio
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from bindery_identity.tls import client_tls

CALL_TIMEOUT_S: Final = 60.0
"""Maximum seconds for which a request is repeated, as `bindery produce` does."""
PAUSE_S: Final = 0.1
"""Pause in seconds after a request that both brokers did not answer."""
INTERVAL_S: Final = 0.1
"""Pause in seconds after a message that was sent, and after messages that were received."""
PROGRESS: Final = 3
"""Number of messages that each client sends and receives between two steps."""
PROGRESS_TIMEOUT_S: Final = 120.0
IN_USE: Final = "idempotency_key_in_use"
"""Code of a 409 after which a request is repeated: the first one is still in progress."""
REPEATED: Final = (429, 503, 504)
SUBSCRIPTION: Final = "s"
KEEPER: Final = "keeper"
"""Subscription without a consumer. It keeps the messages until they are read at the end."""


class Site:
    """The URLs of the brokers, as the operator announces them to clients."""

    def __init__(self, urls: list[str], ca_file: Path) -> None:
        self.urls = urls
        self._ca_file = ca_file

    def use_https(self, number: int) -> None:
        self.urls[number] = self.urls[number].replace("http:", "https:")

    def client(self, url: str) -> httpx.Client:
        verify = client_tls(ca_file=str(self._ca_file)).context if url.startswith("https:") else False
        return httpx.Client(base_url=url, verify=verify, timeout=CALL_TIMEOUT_S, trust_env=False)


class Connection:
    """The requests of one client."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._clients: dict[str, httpx.Client] = {}
        self._at = 0
        self.token = ""
        self.slowest_s = 0.0
        self.repeated = 0

    def call(self, method: str, path: str, *, headers: dict[str, str] | None = None, **request: Any) -> Any:
        """Return the answer. Raises AssertionError for an error, or if there is none in time."""
        began = time.monotonic()
        # A repeated request has the same credentials, because an idempotency key belongs to its role.
        bearer = {"authorization": f"Bearer {self.token}"} if self.token else {}
        reasons: list[str] = []
        while True:
            url = self._site.urls[self._at]
            if url not in self._clients:
                self._clients[url] = self._site.client(url)
            try:
                answer = self._clients[url].request(method, path, headers={**(headers or {}), **bearer}, **request)
            except httpx.TransportError as error:
                reasons.append(f"{url}: {error!r}")
            else:
                if answer.is_success:
                    self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                    return answer.json() if answer.content else None
                reasons.append(f"{url}: {answer.status_code} {answer.text[:300]}")
                is_temporary = answer.status_code in REPEATED or IN_USE in answer.text
                assert is_temporary, f"{method} {path} is refused: {reasons[-1]}"
            self.repeated += 1
            self._at = (self._at + 1) % len(self._site.urls)
            assert time.monotonic() - began < CALL_TIMEOUT_S, f"{method} {path} fails: {reasons[-8:]}"
            if len(reasons) % len(self._site.urls) == 0:
                time.sleep(PAUSE_S)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


class Topic:
    """One producer and one consumer of a topic, each in a thread."""

    def __init__(self, site: Site, name: str, *, has_keys: bool) -> None:
        self.name = name
        self.path = f"/v1/topics/public/default/{name}"
        self.has_keys = has_keys
        self.sending, self.receiving = Connection(site), Connection(site)
        self.acknowledged: list[str] = []
        """Payloads of the messages that the broker confirmed, in their order."""
        self.uncertain: set[str] = set()
        """Payloads of messages that may be stored twice, because roles began while they were sent."""
        self.received: Counter[str] = Counter()

    def prepare(self) -> None:
        """Create the topic, and the subscription that keeps its messages."""
        for path in (self.path, f"{self.path}/subscriptions/{KEEPER}"):
            self.sending.call("PUT", path, json={})

    def send(self) -> None:
        payload = f"{self.name}-{len(self.acknowledged)}"
        if self.has_keys:
            options: dict[str, Any] = {"headers": {"Idempotency-Key": str(uuid.uuid4())}}
        else:
            options = {"params": {"producer": self.name, "sequence_id": len(self.acknowledged)}}
        self.sending.call("POST", f"{self.path}/messages", content=payload, **options)
        self.acknowledged.append(payload)

    def receive(self) -> None:
        body = {"consumer": "c", "max": 20, "wait_ms": 500, "request_id": str(uuid.uuid4())}
        at = f"{self.path}/subscriptions/{SUBSCRIPTION}"
        messages = self.receiving.call("POST", f"{at}/receive", json=body)["messages"]
        if messages:
            ids = [message["message_id"] for message in messages]
            self.receiving.call("POST", f"{at}/ack", json={"message_ids": ids})
            self.received.update(message["payload"] for message in messages)
        self.receiving.call("GET", f"{self.path}/messages", params={"start": "earliest", "max": 5})

    def stored(self) -> Counter[str]:
        """Return how often each payload is stored."""
        found: Counter[str] = Counter()
        start = "earliest"
        while True:
            page = self.sending.call("GET", f"{self.path}/messages", params={"start": start, "max": 500})
            if not page["messages"]:
                return found
            found.update(message["payload"] for message in page["messages"])
            start = page["next"]


class MovingClients:
    """Clients that have a token from `with_tokens` on, and clients that have one from `all_with_tokens` on."""

    def __init__(self, site: Site) -> None:
        self._early = [Topic(site, "early-keys", has_keys=True), Topic(site, "early-ids", has_keys=False)]
        self._late = [Topic(site, "late-keys", has_keys=True), Topic(site, "late-ids", has_keys=False)]
        self.topics = [*self._early, *self._late]
        self._token = ""
        self._stopped = threading.Event()
        self._roles_change = False
        self.failures: list[str] = []

    def _run(self, topic: Topic, action: Any) -> None:
        try:
            while not self._stopped.is_set():
                action(topic)
                self._stopped.wait(INTERVAL_S)
        except Exception as error:
            self.failures.append(f"{topic.name}: {error}")

    def _send(self, topic: Topic) -> None:
        changes, repeated = self._roles_change, topic.sending.repeated
        topic.send()
        if topic.has_keys and topic.sending.repeated > repeated and (changes or self._roles_change):
            topic.uncertain.add(topic.acknowledged[-1])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send and receive during the block. The messages that are left are received at its end."""
        for topic in self.topics:
            topic.prepare()
        threads = [
            threading.Thread(target=self._run, args=(topic, action))
            for topic in self.topics
            for action in (self._send, Topic.receive)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            for thread in threads:
                thread.join()

    @contextmanager
    def roles_change(self) -> Iterator[None]:
        """During the block, a key may belong to two roles."""
        self._roles_change = True
        yield
        self._roles_change = False

    def with_tokens(self, file: Path) -> None:
        self._token = file.read_text().strip()
        self._give_tokens(self._early)

    def all_with_tokens(self) -> None:
        self._give_tokens(self._late)

    def _give_tokens(self, topics: list[Topic]) -> None:
        for topic in topics:
            topic.sending.token = topic.receiving.token = self._token

    async def progress(self) -> None:
        """Wait until each client has sent and received more messages. Fails if a call has failed."""
        before = [(len(topic.acknowledged), topic.received.total()) for topic in self.topics]
        deadline = time.monotonic() + PROGRESS_TIMEOUT_S
        while any(
            len(topic.acknowledged) < sent + PROGRESS or topic.received.total() < received + PROGRESS
            for topic, (sent, received) in zip(self.topics, before, strict=True)
        ):
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, f"no progress: {self.report()}"
            await asyncio.sleep(0.05)

    def report(self) -> str:
        connections = [one for topic in self.topics for one in (topic.sending, topic.receiving)]
        return (
            f"{sum(len(topic.acknowledged) for topic in self.topics)} messages acknowledged, "
            f"{sum(topic.received.total() for topic in self.topics)} received, "
            f"{sum(one.repeated for one in connections)} requests repeated, "
            f"slowest {max(one.slowest_s for one in connections):.1f} s"
        )

    def check(self) -> None:
        """Check that no call failed, and that each acknowledged message is received and stored once."""
        assert self.failures == []
        for topic in self.topics:
            deadline = time.monotonic() + PROGRESS_TIMEOUT_S
            while set(topic.acknowledged) - topic.received.keys():
                assert time.monotonic() < deadline, sorted(set(topic.acknowledged) - topic.received.keys())[:5]
                topic.receive()
            stored = topic.stored()
            assert [payload for payload in topic.acknowledged if not stored[payload]] == []
            assert [payload for payload, count in stored.items() if count > 1 and payload not in topic.uncertain] == []
            topic.sending.close()
            topic.receiving.close()
