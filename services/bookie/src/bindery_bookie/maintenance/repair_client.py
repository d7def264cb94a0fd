"""RepairClient: the ledger client that a bookie repairs itself with, and how it shows the others who it is.

What the other bookies ask of clients is what this one asks: they need the same settings. So unless told otherwise it
uses its own: a token out of its secrets (or one that it signs), its certificate, its authority. Imported only when
there is something to repair: it costs start-up time.
"""

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import Any

from bindery_core.auth_token import sign
from bindery_core.errors import BadRequest
from bindery_core.ids import BookieId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore

from bindery_bookie.access.security import AuthProvider, read_secrets
from bindery_bookie.maintenance.repair import Client
from bindery_bookie.settings import BookieSettings


def connector(
    settings: BookieSettings,
    bookie_id: BookieId,
    metadata: MetadataStore,
    layout: LedgersLayout,
    *,
    randomness: Any,
) -> Callable[[], Awaitable[Client]]:
    """For `Repairer`. What it gives raises BadRequest when the settings do not say how to get past other bookies."""

    async def connect() -> Client:
        loop = asyncio.get_running_loop()
        security = await loop.run_in_executor(None, _security, settings, bookie_id)
        client = await loop.run_in_executor(None, importlib.import_module, "bindery_client.client")
        made: Client = await client.LedgerClient.connect(
            metadata, randomness=randomness, layout=layout, security=security
        )
        return made

    return connect


def _security(settings: BookieSettings, bookie_id: BookieId) -> Any:
    """A `bindery_client.connection.security.ClientSecurity`. Blocks: it reads files."""
    repair, tls, auth = settings.repair, settings.tls, settings.auth
    needs_certificate = auth.provider is AuthProvider.CERTIFICATE
    ca_file = repair.ca_file or tls.ca_file
    if (tls.required or needs_certificate) and not ca_file:
        raise BadRequest("repair from other bookies needs repair.ca_file: they insist on TLS")
    certificate_file, key_file = repair.certificate_file, repair.key_file
    if needs_certificate and not certificate_file:
        certificate_file, key_file = tls.certificate_file, tls.key_file
    module = importlib.import_module("bindery_client.connection.security")
    security = module.load_security(
        ca_file=ca_file or None,
        certificate_file=certificate_file or None,
        key_file=key_file or None,
        check_hostname=repair.check_hostname,
        token_file=repair.token_file or None,
        plugin=auth.plugin,
    )
    if auth.provider is AuthProvider.TOKEN and security.token is None:
        token = _own_token(settings, bookie_id)
        return module.ClientSecurity(tls=security.tls, plugin=security.plugin, token=token)
    return security


def _own_token(settings: BookieSettings, bookie_id: BookieId) -> bytes:
    auth = settings.auth
    if auth.secrets_file:
        return read_secrets(auth.secrets_file)[0]
    return sign(read_secrets(auth.keys_file)[0], subject=str(bookie_id))
