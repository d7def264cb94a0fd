"""Explain to users of jobs why bookies refuse them, and check before an audit that they do not.

Without the check, an audit with wrong credentials would try to read every copy, and report all of them as unknown.

| bookies                              | check                                                                 |
|--------------------------------------|-----------------------------------------------------------------------|
| one accepts the credentials          | passes: the audit reports the others                                  |
| all that answer refuse them          | fails, with the reason of one of them and what to do                  |
| none answers                         | passes: the audit reports them as unreachable                         |
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from bindery_client.connection.connection import NOT_TRUSTED, REFUSES_CLIENT, REFUSES_TLS, REJECTS_CREDENTIALS
from bindery_client.connection.pool import BookiePool
from bindery_client.connection.security import VARIABLES, SecurityFiles
from bindery_client.ledger.bookie_requests import FREE_SPACE
from bindery_core.errors import BinderyError, BookieUnavailable, Unauthorized
from bindery_core.ids import BookieId
from bindery_core.wire import v3
from bindery_core.wire.messages import BookieInfoRequest, Status

REFUSES_READER: Final = "the bookie refuses this client"
"""Part of the error of a read that a bookie refuses."""


def advice(text: str, security: SecurityFiles) -> str:
    """Return what to do about an error of a bookie connection with this text; empty if it is no refusal."""
    if NOT_TRUSTED in text:
        return f"Name the CA of the bookies' certificates in {_name('ca_file')}"
    if REFUSES_TLS in text:
        return f"These bookies have no TLS: leave out {_name('ca_file')}"
    if REJECTS_CREDENTIALS in text and security.ca_file:
        return f"Put a token that the bookies accept into the file of {_name('token_file')}"
    if REJECTS_CREDENTIALS in text:
        return (
            f"Bookies that require TLS need {_name('ca_file')}; otherwise the token in {_name('token_file')} is wrong"
        )
    if REFUSES_CLIENT not in text and REFUSES_READER not in text:
        return ""
    missing = [_name(name) for name in ("token_file", "ca_file") if not getattr(security, name)]
    if missing:
        return f"Bookies that require a token or TLS need {', and '.join(missing)}"
    return "The role of the token must be one of auth.client_roles of the bookies"


def _name(option: str) -> str:
    return f"option {option} or {VARIABLES[option]}"


@asynccontextmanager
async def explained(security: SecurityFiles) -> AsyncIterator[None]:
    """Replace an error in the block, if bookies refused the client, by Unauthorized, which says what to do."""
    try:
        yield
    except BinderyError as error:
        what_to_do = advice(str(error), security)
        if not what_to_do:
            raise
        raise Unauthorized(f"{error}. {what_to_do}") from error


async def check(pool: BookiePool, security: SecurityFiles, *, timeout_s: float) -> None:
    """Ask each registered bookie for its free space. Raises BookieUnavailable if all that answer refuse; call it in a
    block of `explained`."""
    errors = await _Answers(pool).run(list(pool.directory.bookies), timeout_s=timeout_s)
    refusals = {bookie_id: text for bookie_id, text in errors.items() if text is None or advice(text, security)}
    if refusals and None not in refusals.values():
        bookie_id, text = min(refusals.items())
        raise BookieUnavailable(f"no bookie accepts this job; {bookie_id}: {text}")


class _Answers:
    """Asks bookies for something that needs the same role as reading entries."""

    def __init__(self, pool: BookiePool) -> None:
        self._pool = pool
        self._errors: dict[BookieId, str | None] = {}
        self._expected = 0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, bookies: Sequence[BookieId], *, timeout_s: float) -> dict[BookieId, str | None]:
        """Return the error of each bookie; None: it answered."""
        self._expected = len(bookies)
        for bookie_id in bookies:
            request = BookieInfoRequest(self._pool.txn_id(), FREE_SPACE)
            frame = v3.encode_request(request)
            self._pool.connection(bookie_id).send(frame, (request.txn_id,), self, timeout_s=timeout_s)
        if bookies:
            await self._done
        return self._errors

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        is_refused = responses[-1].status == Status.UNAUTHORIZED
        self._note(bookie_id, REFUSES_CLIENT if is_refused else None)

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        self._note(bookie_id, error.message)

    expired = failed

    def _note(self, bookie_id: BookieId, error: str | None) -> None:
        self._errors[bookie_id] = error
        if len(self._errors) == self._expected and not self._done.done():
            self._done.set_result(None)
