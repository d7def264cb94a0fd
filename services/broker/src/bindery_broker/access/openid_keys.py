"""OpenIdKeys: fetch the keys of OpenID issuers in the background, so that no request of a client waits for an issuer.

    GET <issuer>/.well-known/openid-configuration   `issuer` must equal the configured one
    GET <jwks_uri of that document>                 the key set (`bindery_identity.jwks`)

| event                                         | the next read begins                                                |
|-----------------------------------------------|---------------------------------------------------------------------|
| the keys were read                            | after `refresh_s`                                                   |
| the read failed                               | after a back-off from RETRY_S to RETRY_S_MAX; the last keys stay    |
| a token has an unknown key                    | at once, but at least UNKNOWN_KEY_INTERVAL_S after the last read    |

Each read is bounded: READ_TIMEOUT_S for both documents, JWKS_SIZE_MAX bytes for each, no redirects, no compression, and
https only, because whoever can change the keys can sign tokens. Issuers with a file are not fetched.

| metric                                          | meaning                                                           |
|-------------------------------------------------|-------------------------------------------------------------------|
| `bindery_openid_keys{issuer}`                   | number of keys                                                    |
| `bindery_openid_keys_read_seconds{issuer}`      | when they were read, in seconds since 1970; 0: never              |
| `bindery_openid_read_failures_total{issuer}`    | reads that failed                                                 |

Source: OpenID Connect Discovery 1.0 section 4.
"""

import asyncio
import contextlib
import json
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from bindery_core.backoff import Backoff
from bindery_core.errors import BadRequest, BinderyError
from bindery_identity.jwks import JWKS_SIZE_MAX, parse_jwks
from bindery_identity.openid import IssuerKeys, is_https
from bindery_kit.observability.logs import get_logger
from bindery_kit.observability.metrics_page import Page, labels

if TYPE_CHECKING:
    import httpx

READ_TIMEOUT_S: Final = 10.0
"""Maximum seconds of a read of an issuer's keys, with both documents."""
RETRY_S: Final = 1.0
"""Seconds between the first read that fails and the next one."""
RETRY_S_MAX: Final = 60.0
"""Maximum seconds between a read that fails and the next one."""
UNKNOWN_KEY_INTERVAL_S: Final = 30.0
"""Minimum seconds between two reads of an issuer that tokens with unknown keys cause. Source: Pulsar's
openIDKeyIdCacheMissRefreshSeconds, 300 there."""
DISCOVERY_PATH: Final = "/.well-known/openid-configuration"

log = get_logger(__name__)


class OpenIdKeys:
    """Fetches the keys of `issuers`. `now_s`: seconds since 1970. `refresh_s`: seconds between two reads."""

    def __init__(
        self, issuers: Sequence[IssuerKeys], *, tls: ssl.SSLContext, now_s: Callable[[], float], refresh_s: float
    ) -> None:
        self._issuers = issuers
        self._fetched = [issuer for issuer in issuers if issuer.file is None]
        self._tls = tls
        self._now_s = now_s
        self._refresh_s = refresh_s
        self.on_replaced: Callable[[], None] = lambda: None
        """Called in the event loop after the keys of an issuer were replaced by others."""
        self._failures: Counter[str] = Counter()
        self._tried = {issuer.url: asyncio.Event() for issuer in self._fetched}

    async def run(self) -> None:
        """Fetch keys until cancelled."""
        import httpx  # loads slowly, and the port is already bound

        client = httpx.AsyncClient(verify=self._tls, timeout=READ_TIMEOUT_S, follow_redirects=False, trust_env=False)
        async with client as http, asyncio.TaskGroup() as tasks:
            for issuer in self._fetched:
                tasks.create_task(self._follow(http, issuer), name=f"openid-{issuer.url}")
            await asyncio.Event().wait()

    async def tried(self) -> None:
        """Return when each issuer was read once, or failed once, or after READ_TIMEOUT_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_TIMEOUT_S):
                for tried in self._tried.values():
                    await tried.wait()

    def render(self) -> bytes:
        """Return the metrics as text for Prometheus; nothing without issuers."""
        if not self._issuers:
            return b""
        page = Page()
        rows: tuple[tuple[str, str, str, Callable[[IssuerKeys], float]], ...] = (
            ("bindery_openid_keys", "gauge", "Keys of OpenID issuers.", lambda issuer: issuer.count),
            (
                "bindery_openid_keys_read_seconds",
                "gauge",
                "When the keys of OpenID issuers were read, in seconds since 1970; 0: never.",
                lambda issuer: issuer.read_at_s or 0,
            ),
            (
                "bindery_openid_read_failures_total",
                "counter",
                "Reads of the keys of OpenID issuers that failed.",
                lambda issuer: self._failures[issuer.url],
            ),
        )
        for name, kind, help, value in rows:
            issuers = self._issuers if name == "bindery_openid_keys" else self._fetched
            page.add(name, kind, help, [(labels({"issuer": issuer.url}), value(issuer)) for issuer in issuers])
        return page.render()

    async def _follow(self, http: "httpx.AsyncClient", issuer: IssuerKeys) -> None:
        loop = asyncio.get_running_loop()
        unknown_key = asyncio.Event()
        issuer.on_unknown_key = unknown_key.set
        backoff = Backoff(RETRY_S, RETRY_S_MAX)
        reported: str | None = None
        while True:
            unknown_key.clear()
            failure = await self._read(http, issuer)
            read_s = loop.time()
            if failure is None:
                if reported is not None:
                    log.info("openid_keys_read", issuer=issuer.url, keys=issuer.count)
                backoff.reset()
                delay_s = self._refresh_s
            else:
                self._failures[issuer.url] += 1
                delay_s = min(backoff.next_delay_s(), self._refresh_s)
                if failure != reported:
                    log.error(
                        "openid_keys_not_read",
                        issuer=issuer.url,
                        error=failure,
                        hint="the last keys stay in force for auth.openid_keys_max_age_s; check auth.openid_issuers, "
                        "auth.openid_ca_file and the network",
                    )
            reported = failure
            self._tried[issuer.url].set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await unknown_key.wait()
                    await asyncio.sleep(max(0.0, read_s + UNKNOWN_KEY_INTERVAL_S - loop.time()))

    async def _read(self, http: "httpx.AsyncClient", issuer: IssuerKeys) -> str | None:
        """Replace the keys of the issuer. Return why that failed; None if it did not. Never raises."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                document = _object(await _get(http, issuer.url.removesuffix("/") + DISCOVERY_PATH))
                if document.get("issuer") != issuer.url:
                    raise BadRequest(
                        "the issuer publishes another name for itself; configure the URL exactly as it does",
                        published=str(document.get("issuer"))[:200],
                    )
                jwks_uri = document.get("jwks_uri")
                if not isinstance(jwks_uri, str) or not is_https(jwks_uri.partition("?")[0]):
                    raise BadRequest("the issuer publishes no https URL of its key set (jwks_uri)")
                keys = parse_jwks(await _get(http, jwks_uri))
            if issuer.replace(keys, now_s=self._now_s()):
                self.on_replaced()
        except TimeoutError:
            return f"the issuer did not answer within {READ_TIMEOUT_S:g} s"
        except BinderyError as error:
            return str(error)
        except Exception as error:  # of the HTTP client, of TLS, or of a library that reads what the issuer sends
            return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return None


async def _get(http: "httpx.AsyncClient", url: str) -> bytes:
    """Return the body of an answer 200. Raises BadRequest, and the errors of the client."""
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    async with http.stream("GET", url, headers=headers) as answer:
        if answer.status_code != 200:
            raise BadRequest("an answer is not 200 OK", url=url, status=answer.status_code)
        if "content-encoding" in answer.headers:
            raise BadRequest("an answer is compressed, although the request does not allow it", url=url)
        body = bytearray()
        async for piece in answer.aiter_raw():
            body += piece
            if len(body) > JWKS_SIZE_MAX:
                raise BadRequest("an answer is too large", url=url, size_max=JWKS_SIZE_MAX)
    return bytes(body)


def _object(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadRequest("the discovery document is not a JSON object")
    return found
