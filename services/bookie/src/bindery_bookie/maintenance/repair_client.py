"""Connect the ledger client with which a bookie reads from other bookies, and choose the credentials it presents.

All bookies of a cluster require the same credentials from their clients. Unless the repair settings name others, the
client therefore presents credentials that this bookie itself would accept: a token from its secrets file or one signed
with its key, and its certificate. The client is imported when it is first needed, because the import delays the start.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from bindery_core.errors import BadRequest
from bindery_core.ids import BookieId
from bindery_core.sources import RandomSource
from bindery_identity.followed import FollowedFile
from bindery_identity.keys import Key
from bindery_identity.tls import TlsFiles, client_tls
from bindery_identity.token_file import TokenFile
from bindery_identity.tokens import sign
from bindery_kit.admin.access import follow_keys, follow_secrets
from bindery_kit.process.late_imports import in_thread
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore

from bindery_bookie.access.security import AuthProvider, AuthSettings
from bindery_bookie.settings import BookieSettings

if TYPE_CHECKING:
    from bindery_client.client import LedgerClient
    from bindery_client.connection.security import ClientSecurity


def connector(
    settings: BookieSettings,
    bookie_id: BookieId,
    metadata: MetadataStore,
    layout: LedgersLayout,
    *,
    randomness: RandomSource,
) -> "Callable[[], Awaitable[LedgerClient]]":
    """Return a function that connects a client. The function raises BadRequest if the settings lack credentials that
    other bookies require."""

    async def connect() -> "LedgerClient":
        client = await in_thread(import_client)
        security = await asyncio.get_running_loop().run_in_executor(None, _security, settings, bookie_id)
        return await client.connect(metadata, randomness=randomness, layout=layout, security=security)

    return connect


def import_client() -> "type[LedgerClient]":
    from bindery_client.client import LedgerClient

    return LedgerClient


def _security(settings: BookieSettings, bookie_id: BookieId) -> "ClientSecurity":
    """Return the credentials that the module's docstring describes. Blocks, because it reads files."""
    from bindery_client.connection.security import load_security

    repair, auth = settings.repair, settings.auth
    files = _certificate_files(settings)
    if (settings.tls.required or auth.provider is AuthProvider.CERTIFICATE) and not files.ca_file:
        raise BadRequest("cannot repair from other bookies: they require TLS. Set repair.ca_file")
    security = load_security(
        ca_file=files.ca_file or None,
        certificate_file=files.certificate_file or None,
        key_file=files.key_file or None,
        check_hostname=repair.check_hostname,
        token_file=repair.token_file or None,
        plugin=auth.plugin,
    )
    if auth.provider is AuthProvider.TOKEN and security.token is None:
        tokens = _own_token(settings, bookie_id)
        return replace(security, token=tokens.value, token_files=tokens)
    return security


class _CertificateFiles(NamedTuple):
    ca_file: str
    certificate_file: str
    key_file: str


def _certificate_files(settings: BookieSettings) -> _CertificateFiles:
    """Return the files of the certificates that the client trusts and presents; empty: none."""
    repair, tls = settings.repair, settings.tls
    ca_file = repair.ca_file or tls.ca_file
    if settings.auth.provider is AuthProvider.CERTIFICATE and not repair.certificate_file:
        return _CertificateFiles(ca_file, tls.certificate_file, tls.key_file)
    return _CertificateFiles(ca_file, repair.certificate_file, repair.key_file)


def own_certificate(settings: BookieSettings, *, now_s: Callable[[], float]) -> TlsFiles | None:
    """Return the files of the certificate that the client presents, to show when it expires; None: it presents none.

    `now_s`: seconds since 1970. Raises BadRequest for files that cannot be used, and for an expired certificate.
    """
    files = _certificate_files(settings)
    if not (files.ca_file and files.certificate_file):
        return None
    return client_tls(**files._asdict(), now_s=now_s)


def repair_token(settings: BookieSettings) -> TokenFile | None:
    """Return the file of the token that the settings name for the client, to show when it expires; None: it presents
    none, or one that the bookie itself makes, which does not expire. Raises BadRequest if it cannot be used."""
    path = settings.repair.token_file
    return TokenFile(path) if path else None


def _own_token(settings: BookieSettings, bookie_id: BookieId) -> FollowedFile[bytes]:
    """Return the token, which is made again when the file of secrets or keys was replaced."""
    auth = settings.auth
    if auth.secrets_file:
        return follow_secrets(auth.secrets_file, lambda secrets: secrets[0])
    return follow_keys(auth.keys_file, lambda keys: _signed(keys, auth, bookie_id))


def _signed(keys: Sequence[Key], auth: AuthSettings, bookie_id: BookieId) -> bytes:
    key = next((key for key in keys if key.is_secret), None)
    if key is None:
        raise BadRequest(
            "cannot repair from other bookies: auth.keys_file has only public keys, which cannot sign a token for this "
            "bookie. Set repair.token_file"
        )
    return sign(key, subject=str(bookie_id), audience=auth.audience or None)
