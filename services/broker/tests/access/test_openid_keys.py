"""The keys of OpenID issuers, fetched from a local https server with a CA of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import structlog
from bindery_broker.access import openid_keys
from bindery_broker.access.openid_keys import DISCOVERY_PATH, OpenIdKeys
from bindery_core.errors import Unauthorized
from bindery_identity.jwks import JWKS_SIZE_MAX
from bindery_identity.openid import IssuerKeys
from bindery_identity.tls import client_tls
from bindery_simulation.certificates.authority import Authority
from openid_provider import Provider, key_set

NOW_S = 1_700_000_000.0


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[Provider]:
    provider = Provider(Authority(tmp_path))
    await provider.start()
    yield provider
    provider.stop()


@contextlib.asynccontextmanager
async def following(
    provider: Provider, *, ca_file: Path | None = None, refresh_s: float = 3600.0
) -> AsyncIterator[tuple[IssuerKeys, OpenIdKeys]]:
    """The keys of the provider after the first read."""
    issuer = IssuerKeys(provider.url, audiences=["bindery"], max_age_s=100.0)
    tls = client_tls(ca_file=str(ca_file or provider.authority.ca_file))
    keys = OpenIdKeys([issuer], tls=tls.context, now_s=lambda: NOW_S, refresh_s=refresh_s)
    running = asyncio.create_task(keys.run())
    try:
        await keys.tried()
        yield issuer, keys
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_keys_are_found_by_the_url_of_the_issuer(provider: Provider) -> None:
    async with following(provider) as (issuer, keys):
        assert (issuer.count, issuer.read_at_s) == (1, NOW_S)
        assert provider.asked == [f"/realm{DISCOVERY_PATH}", "/keys"]
        page = keys.render().decode().splitlines()
        assert f'bindery_openid_keys{{issuer="{provider.url}"}} 1' in page
        assert f'bindery_openid_read_failures_total{{issuer="{provider.url}"}} 0' in page


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda p: p.discover(issuer="https://other.example"), "publishes another name"),
        (lambda p: p.discover(jwks_uri="http://localhost/keys"), "no https URL of its key set"),
        (lambda p: p.discover(jwks_uri=None), "no https URL of its key set"),
        (lambda p: p.answer(f"/realm{DISCOVERY_PATH}", b"[]"), "not a JSON object"),
        (lambda p: p.answer(f"/realm{DISCOVERY_PATH}", b"", 302, location="https://other.example"), "not 200 OK"),
        (lambda p: p.answer("/keys", b"{}"), "no list `keys`"),
        (lambda p: p.answer("/keys", b" " * (JWKS_SIZE_MAX + 1)), "too large"),
        (lambda p: p.answer("/keys", key_set("a"), content_encoding="gzip"), "compressed"),
    ],
)
async def test_documents_that_cannot_be_trusted_are_refused(
    provider: Provider, change: Callable[[Provider], None], reason: str
) -> None:
    change(provider)
    with structlog.testing.capture_logs() as logs:
        async with following(provider) as (issuer, keys):
            assert issuer.count == 0
            assert f'bindery_openid_read_failures_total{{issuer="{provider.url}"}} 1' in keys.render().decode()
    assert [reason in line["error"] for line in logs if line["event"] == "openid_keys_not_read"] == [True]


async def test_an_issuer_whose_certificate_is_not_trusted_is_refused(provider: Provider, tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with following(provider, ca_file=Authority(tmp_path, "stranger").ca_file) as (issuer, _):
            assert issuer.count == 0
    assert "certificate verify failed" in logs[0]["error"]
    assert provider.asked == []


async def test_an_issuer_that_does_not_answer_keeps_nobody_waiting(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openid_keys, "READ_TIMEOUT_S", 0.2)

    async def get(*_: object) -> bytes:
        await asyncio.Event().wait()
        return b""

    monkeypatch.setattr(openid_keys, "_get", get)
    with structlog.testing.capture_logs() as logs:
        async with following(provider) as (issuer, _):
            await until(lambda: bool(logs))
            assert issuer.count == 0
    assert logs[0]["error"] == "the issuer did not answer within 0.2 s"


async def test_the_last_keys_stay_while_the_issuer_fails_and_new_ones_follow(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openid_keys, "RETRY_S", 0.001)
    with structlog.testing.capture_logs() as logs:
        async with following(provider, refresh_s=0.01) as (issuer, keys):
            replaced: list[int] = []
            keys.on_replaced = lambda: replaced.append(issuer.count)
            provider.answer("/keys", b"", 500)
            await until(lambda: bool(logs))
            assert issuer.count == 1
            provider.answer("/keys", key_set("a", "b"))
            await until(lambda: issuer.count == 2)
            assert replaced == [2]
    assert [line["event"] for line in logs] == ["openid_keys_not_read", "openid_keys_read"]


async def test_an_unknown_key_causes_a_read_at_a_limited_rate(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openid_keys, "UNKNOWN_KEY_INTERVAL_S", 0.2)

    def present(issuer: IssuerKeys) -> None:
        with pytest.raises(Unauthorized, match="no key of this name"):
            issuer.verify(b"a.b.c", "new", now_s=NOW_S)

    async with following(provider) as (issuer, _):
        began_s = asyncio.get_running_loop().time()
        provider.answer("/keys", key_set("a", "b"))
        for _ in range(1_000):
            present(issuer)
        await until(lambda: issuer.count == 2)
        assert asyncio.get_running_loop().time() - began_s >= 0.15
        assert provider.asked.count("/keys") == 2
        present(issuer)
        await until(lambda: provider.asked.count("/keys") == 3)
