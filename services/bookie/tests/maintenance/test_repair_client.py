"""The client of the repair presents credentials that this bookie itself would accept."""

import random
import ssl
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.access.security import AuthProvider, AuthSettings, TlsSettings
from bindery_bookie.maintenance.repair_client import connector, import_client
from bindery_bookie.settings import BookieSettings, RepairSettings
from bindery_client.client import LedgerClient
from bindery_client.connection.security import ClientSecurity
from bindery_core.errors import BadRequest
from bindery_core.ids import BookieId
from bindery_identity.tls import FollowedContext
from bindery_identity.tokens import SignedTokens
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree
from bindery_simulation.certificates import CA, OTHER_CA, certificate, key

ID = BookieId("b-1")


async def security_of(
    monkeypatch: pytest.MonkeyPatch,
    *,
    auth: AuthSettings | None = None,
    tls: TlsSettings | None = None,
    repair: RepairSettings | None = None,
) -> ClientSecurity:
    """Return the credentials with which the connector connects a client."""
    connected: list[tuple[Any, dict[str, Any]]] = []

    async def connect(store: Any, **options: Any) -> str:
        connected.append((store, options))
        return "the client"

    monkeypatch.setattr(LedgerClient, "connect", connect)
    settings = BookieSettings(auth=auth or AuthSettings(), tls=tls or TlsSettings(), repair=repair or RepairSettings())
    store, layout, randomness = MemoryTree().connect(), LedgersLayout("/other"), random.Random(1)
    made = await connector(settings, ID, store, layout, randomness=randomness)()
    assert made == "the client"  # type: ignore[comparison-overlap]
    ((used, options),) = connected
    assert used is store
    assert options["layout"] is layout
    assert options["randomness"] is randomness
    security: ClientSecurity = options["security"]
    return security


def put(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


async def test_a_cluster_without_authentication_needs_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    security = await security_of(monkeypatch)
    assert (security.tls, security.token, security.plugin) == (None, None, "bindery")
    assert import_client() is LedgerClient


async def test_the_first_of_the_own_secrets_is_presented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = put(tmp_path / "secrets", "first-secret-of-the-cluster\nsecond-secret-of-the-cluster\n")
    auth = AuthSettings(provider=AuthProvider.TOKEN, secrets_file=secrets, plugin="other")
    security = await security_of(monkeypatch, auth=auth)
    assert (security.token, security.plugin, security.tls) == (b"first-secret-of-the-cluster", "other", None)


async def test_a_token_is_signed_with_the_first_of_the_own_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = put(tmp_path / "keys", "a-key-of-at-least-thirty-two-bytes-1\na-key-of-at-least-thirty-two-bytes-2\n")
    security = await security_of(monkeypatch, auth=AuthSettings(provider=AuthProvider.TOKEN, keys_file=keys))
    assert security.token is not None
    first = SignedTokens([b"a-key-of-at-least-thirty-two-bytes-1"])
    assert first.verify(security.token, now_s=0).subject == "b-1"


@pytest.mark.parametrize("audience", ["", "bookies"])
async def test_the_own_token_is_for_the_bookies_audience_and_signed_with_a_key_in_pulsars_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, audience: str
) -> None:
    key_bytes = bytes(range(32))
    (tmp_path / "key").write_bytes(key_bytes)
    auth = AuthSettings(provider=AuthProvider.TOKEN, keys_file=f"file://{tmp_path}/key", audience=audience)
    security = await security_of(monkeypatch, auth=auth)
    assert security.token is not None
    assert SignedTokens([key_bytes], audience=audience or None).verify(security.token, now_s=0).subject == "b-1"


async def test_the_token_of_the_repair_settings_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auth = AuthSettings(provider=AuthProvider.TOKEN, secrets_file=put(tmp_path / "secrets", "a-secret-of-the-cluster"))
    repair = RepairSettings(token_file=put(tmp_path / "token", "of-the-repair\n"))
    assert (await security_of(monkeypatch, auth=auth, repair=repair)).token == b"of-the-repair"
    assert (await security_of(monkeypatch, repair=repair)).token == b"of-the-repair"


async def test_bookies_that_require_tls_need_a_ca(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in (
        {"tls": TlsSettings(required=True)},
        {"auth": AuthSettings(provider=AuthProvider.CERTIFICATE)},
    ):
        with pytest.raises(BadRequest, match=r"they require TLS\. Set repair\.ca_file"):
            await security_of(monkeypatch, **settings)  # type: ignore[arg-type]


async def test_the_own_ca_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    security = await security_of(monkeypatch, tls=TlsSettings(required=True, ca_file=str(CA)))
    assert security.tls is not None
    assert security.tls.check_hostname
    assert security.token is None
    assert len(security.tls.get_ca_certs()) == 1


async def test_the_ca_and_the_host_check_of_the_repair_settings_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    own = await security_of(monkeypatch, tls=TlsSettings(ca_file=str(CA)))
    repair = RepairSettings(ca_file=str(OTHER_CA), check_hostname=False)
    other = await security_of(monkeypatch, tls=TlsSettings(ca_file=str(CA)), repair=repair)
    assert own.tls is not None
    assert other.tls is not None
    assert own.tls.get_ca_certs(binary_form=True) != other.tls.get_ca_certs(binary_form=True)
    assert not other.tls.check_hostname


class Loaded:
    """The certificates that were loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        load = ssl.SSLContext.load_cert_chain

        def count(*args: Any, **kwargs: Any) -> None:
            self.count += 1
            load(*args, **kwargs)

        monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", count)


def files_of(security: ClientSecurity) -> tuple[str, ...]:
    assert isinstance(security.tls, FollowedContext)
    assert security.tls.files is not None
    return security.tls.files.paths


async def test_the_own_certificate_is_presented_only_if_bookies_require_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded(monkeypatch)
    tls = TlsSettings(certificate_file=str(certificate("bookie")), key_file=str(key("bookie")), ca_file=str(CA))
    assert files_of(await security_of(monkeypatch, tls=tls)) == (str(CA),)
    assert loaded.count == 0
    required = await security_of(monkeypatch, tls=tls, auth=AuthSettings(provider=AuthProvider.CERTIFICATE))
    assert files_of(required) == (str(CA), str(certificate("bookie")), str(key("bookie")))
    assert loaded.count == 1


async def test_the_certificate_of_the_repair_settings_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded(monkeypatch)
    tls = TlsSettings(certificate_file=str(certificate("bookie")), key_file=str(key("bookie")), ca_file=str(CA))
    repair = RepairSettings(certificate_file=str(certificate("client")), key_file=str(key("client")))
    for auth in (AuthSettings(), AuthSettings(provider=AuthProvider.CERTIFICATE)):
        security = await security_of(monkeypatch, tls=tls, repair=repair, auth=auth)
        assert files_of(security) == (str(CA), str(certificate("client")), str(key("client")))
    assert loaded.count == 2


async def test_the_own_token_follows_the_file_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = put(tmp_path / "keys", "a-key-of-at-least-thirty-two-bytes-1\n")
    security = await security_of(monkeypatch, auth=AuthSettings(provider=AuthProvider.TOKEN, keys_file=keys))
    put(tmp_path / "new", "a-key-of-at-least-thirty-two-bytes-2\n")
    (tmp_path / "new").replace(keys)
    security.poll()
    token = security.current_token
    assert token is not None
    assert SignedTokens([b"a-key-of-at-least-thirty-two-bytes-2"]).verify(token, now_s=0).subject == "b-1"
