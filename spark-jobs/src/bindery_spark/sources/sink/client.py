"""Send messages to brokers over HTTP, and repeat requests until they succeed: brokers store each message once.

| answer                                                    | what follows                                            |
|-----------------------------------------------------------|---------------------------------------------------------|
| 200                                                       | the messages are durable                                |
| no connection, a cut one, a timeout; 429, 502, 503, 504;  | the request is repeated, with back-off, perhaps at      |
| 409 because another request of the producer is running;   | another broker, for `retry_s` seconds at most           |
| 207 with such errors only                                 |                                                         |
| anything else                                             | SinkRefused, with the row and the reason                |
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import quote

import httpx
from bindery_core.backoff import Backoff
from bindery_core.errors import BinderyError, TryAgain
from bindery_core.sources import RandomFloats
from bindery_identity.tls import client_tls
from bindery_pulsar.topic_name import TopicName

RETRY_S: Final = 0.1
"""First delay in seconds before a request is repeated."""
RETRY_S_MAX: Final = 5.0
"""Maximum delay in seconds before a request is repeated."""
TEMPORARY: Final = frozenset({429, 502, 503, 504})
IN_PROGRESS: Final = "idempotency_key_in_use"
"""Code of the 409 for a producer whose earlier request is still in progress."""
NDJSON: Final = "application/x-ndjson"


class SinkUnavailable(TryAgain):
    """No broker accepted a request in time. The task can be repeated."""


class SinkRefused(BinderyError):
    """A broker refused a request for good."""

    code = "refused"


class Brokers:
    """The brokers of a cluster, any of which takes any request. Not for several threads."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float,
        retry_s: float,
        now: Callable[[], float],
        sleep: Callable[[float], None],
        randomness: RandomFloats,
        transport: httpx.BaseTransport | None = None,
        ca_file: str = "",
    ) -> None:
        """`now`: monotonic seconds. `ca_file`: CA certificates that sign those of https URLs; empty: those that the
        system trusts. Raises BadRequest if it cannot be used."""
        self._urls = list(urls)
        self._retry_s = retry_s
        self._now = now
        self._sleep = sleep
        self._randomness = randomness
        is_secure = any(url.startswith("https:") for url in urls)
        verify = client_tls(ca_file=ca_file).context if is_secure else True
        self._http = httpx.Client(timeout=timeout_s, transport=transport, trust_env=False, verify=verify)

    def close(self) -> None:
        self._http.close()

    def last_sequence_id(self, topic: TopicName, producer: str) -> int:
        """Return the highest sequence id of a producer that is stored in the topic; -1: none, or it is forgotten."""
        path = f"{_path(topic)}/producers/{quote(producer, safe='')}"
        answer = self._request("GET", path, what=f"the last sequence id of {producer}")
        if answer.status_code == httpx.codes.NOT_FOUND and _problem(answer).get("code") == "no_such_topic":
            return -1
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise SinkRefused("the brokers are too old: they do not store messages by sequence ids", url=self._urls[0])
        if answer.status_code != httpx.codes.OK:
            raise SinkRefused(_reason(answer), topic=topic.short)
        return int(answer.json()["last_sequence_id"])

    def partitions(self, topic: TopicName) -> int:
        """Return the number of partitions of a topic; 0: it is not partitioned, or does not exist yet."""
        if topic.partition >= 0:
            return 0
        answer = self._request("GET", f"{_path(topic)}/partitions", what=f"the partitions of {topic.short}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return 0
        if answer.status_code != httpx.codes.OK:
            raise SinkRefused(_reason(answer), topic=topic.short)
        found = answer.json()
        if found.get("deleted"):
            raise SinkRefused("the topic is being deleted", topic=topic.short)
        return int(found["partitions"])

    def send(self, topic: TopicName, producer: str, lines: Sequence[bytes], rows: Sequence[int]) -> None:
        """Store messages, with sequence ids, and return once they are durable. `rows`: their row numbers, for errors.

        Raises SinkUnavailable or SinkRefused. Some or all messages may be stored then.
        """
        path = f"{_path(topic)}/messages?producer={quote(producer, safe='')}"
        what = f"rows {rows[0]} to {rows[-1]} of topic {topic.short}"
        answer = self._request("POST", path, content=b"\n".join(lines), what=what)
        if answer.status_code == httpx.codes.OK:
            return
        if answer.status_code == httpx.codes.MULTI_STATUS:
            for row, result in zip(rows, answer.json()["results"], strict=True):
                error = result.get("error")
                if error is not None and error["status"] not in TEMPORARY:
                    raise SinkRefused(f"row {row} was refused: {error['detail']}", topic=topic.short)
        problem = _problem(answer)
        index = problem.get("facts", {}).get("index") if isinstance(problem.get("facts"), dict) else None
        if isinstance(index, int) and 0 <= index < len(rows):
            raise SinkRefused(f"row {rows[index]} was refused: {_reason(answer)}", topic=topic.short)
        raise SinkRefused(f"{what} were refused: {_reason(answer)}", topic=topic.short)

    def _request(self, method: str, path: str, *, what: str, content: bytes | None = None) -> httpx.Response:
        backoff = Backoff(RETRY_S, RETRY_S_MAX, jitter=0.25, randomness=self._randomness)
        deadline = self._now() + self._retry_s
        headers = {} if content is None else {"content-type": NDJSON}
        while True:
            try:
                answer = self._http.request(method, self._urls[0] + path, content=content, headers=headers)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if not _is_temporary(answer):
                    return answer
                reason = _reason(answer)
            delay_s = backoff.next_delay_s()
            if self._now() + delay_s > deadline:
                raise SinkUnavailable(
                    f"no broker accepted {what} within {self._retry_s:g} s; the last answer: {reason}",
                    url=self._urls[0],
                    attempts=backoff.failures,
                )
            self._sleep(delay_s)
            self._urls.append(self._urls.pop(0))


def _path(topic: TopicName) -> str:
    return "/v1/topics/" + "/".join(quote(part, safe="") for part in (topic.tenant, topic.namespace, topic.local))


def _is_temporary(answer: httpx.Response) -> bool:
    status = answer.status_code
    if status == httpx.codes.MULTI_STATUS:
        errors = [result["error"] for result in answer.json()["results"] if "error" in result]
        return all(error["status"] in TEMPORARY for error in errors)
    return status in TEMPORARY or (status == httpx.codes.CONFLICT and _problem(answer).get("code") == IN_PROGRESS)


def _problem(answer: httpx.Response) -> dict[str, Any]:
    try:
        problem = json.loads(answer.content)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def _reason(answer: httpx.Response) -> str:
    problem = _problem(answer)
    detail = problem.get("detail") or answer.text[:300] or answer.reason_phrase
    return f"{detail} ({answer.status_code}{', ' + problem['code'] if 'code' in problem else ''})"
