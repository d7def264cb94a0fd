"""Send messages to brokers over HTTP, and repeat requests until they succeed: brokers store each message once.

| answer                                                    | what follows                                            |
|-----------------------------------------------------------|---------------------------------------------------------|
| 200                                                       | the messages are durable                                |
| no connection, a cut one, a timeout; 429, 502, 503, 504;  | the request is repeated, with back-off, perhaps at      |
| 409 because another request of the producer is running;   | another broker, for `retry_s` seconds at most           |
| 207 with such errors only                                 |                                                         |
| 401, and the file of the token has changed meanwhile      | the request is repeated at once, with the new token     |
| another 401, 403; certificates that are not trusted, of   | SinkRefused, with the reason and what to do             |
| all brokers                                               |                                                         |
| anything else                                             | SinkRefused, with the row and the reason                |

The token is read from its file again, if that has changed, before each request. No error contains it.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import quote

import httpx
from bindery_core.backoff import Backoff
from bindery_core.errors import BadRequest, BinderyError, TryAgain
from bindery_core.sources import RandomFloats
from bindery_identity.tls import client_tls
from bindery_identity.token_file import TokenFile
from bindery_pulsar.topic_name import TopicName

from bindery_spark.sources.sink.options import CA_FILE_VARIABLE, TOKEN_FILE_VARIABLE

RETRY_S: Final = 0.1
"""First delay in seconds before a request is repeated."""
RETRY_S_MAX: Final = 5.0
"""Maximum delay in seconds before a request is repeated."""
TEMPORARY: Final = frozenset({429, 502, 503, 504})
IN_PROGRESS: Final = "idempotency_key_in_use"
"""Code of the 409 for a producer whose earlier request is still in progress."""
NDJSON: Final = "application/x-ndjson"
REFUSALS: Final = frozenset({httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN})
"""A request with the same token is refused again."""
UNTRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"
"""Part of the error if the certificate of a broker is not trusted. Repeating the request does not help."""
TRUST: Final = (
    f"Name the CA of the brokers' certificates in option ca_file or {CA_FILE_VARIABLE}; the host of the URL must be in "
    "the certificate"
)


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
        token_file: str = "",
    ) -> None:
        """`now`: monotonic seconds. `ca_file`: CA certificates that sign those of https URLs; empty: those that the
        system trusts. `token_file`: the bearer token; empty: none is sent. Raises BadRequest if one cannot be used."""
        self._urls = list(urls)
        self._retry_s = retry_s
        self._now = now
        self._sleep = sleep
        self._randomness = randomness
        is_secure = any(url.startswith("https:") for url in urls)
        self._token_file = token_file
        try:
            verify: Any = client_tls(ca_file=ca_file).context if is_secure else True
        except BadRequest as error:
            raise BadRequest(f"cannot use option ca_file or {CA_FILE_VARIABLE}: {error}") from error
        try:
            self._token = TokenFile(token_file) if token_file else None
        except BadRequest as error:
            raise BadRequest(f"cannot use option token_file or {TOKEN_FILE_VARIABLE}: {error}") from error
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
        untrusted: set[str] = set()
        while True:
            token = None if self._token is None else self._token.newest()
            headers = _headers(token, is_post=content is not None)
            try:
                answer = self._http.request(method, self._urls[0] + path, content=content, headers=headers)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
                if UNTRUSTED in reason:
                    untrusted.add(self._urls[0])
                if untrusted.issuperset(self._urls):
                    raise SinkRefused(f"{what}: no broker is trusted: {reason}. {TRUST}", url=self._urls[0]) from None
            else:
                if answer.status_code in REFUSALS:
                    if self._token is not None and self._token.newest() != token:
                        continue
                    raise self._refused(what, answer)
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

    def _refused(self, what: str, answer: httpx.Response) -> SinkRefused:
        """Return the error for a 401 or 403, which says what to do."""
        if answer.status_code == httpx.codes.FORBIDDEN:
            advice = "Grant the role of the token the permission (bindery permissions grant --action produce)"
        elif not self._token_file:
            advice = f"No token was sent: name its file in option token_file or {TOKEN_FILE_VARIABLE}"
        else:
            advice = (
                f"Put a token that the brokers accept into {self._token_file}; `bindery tokens validate` checks "
                "signature and expiry"
            )
        return SinkRefused(f"{what}: the broker refuses this job: {_reason(answer)}. {advice}", url=self._urls[0])


def _headers(token: bytes | None, *, is_post: bool) -> dict[str, str]:
    """Return the headers of a request. Raises BadRequest for a token that no header can contain."""
    headers = {"content-type": NDJSON} if is_post else {}
    if token is not None:
        if not token.isascii() or not token.decode("ascii").isprintable() or b" " in token:
            raise BadRequest(f"option token_file or {TOKEN_FILE_VARIABLE} names a file whose first line is not a token")
        headers["authorization"] = f"Bearer {token.decode('ascii')}"
    return headers


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
