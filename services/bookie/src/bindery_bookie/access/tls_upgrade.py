"""TlsUpgrade: the state machine that takes one connection from clear text to TLS. Pure: no I/O, no tasks, no clock.

| state     | event                              | next      | effect                                               |
|-----------|------------------------------------|-----------|------------------------------------------------------|
| CLEAR     | requests, no START_TLS among them  | CLEAR     | all are handled                                      |
| CLEAR     | requests, START_TLS is the last    | CLEAR     | all are handled; handling START_TLS calls `accept`   |
| CLEAR     | requests, only AUTH behind         | CLEAR     | those up to START_TLS are handled, AUTH is held; if  |
|           | START_TLS                          |           | TLS is required, the connection is refused instead   |
| CLEAR     | requests, anything else behind     | CLEAR     | the connection is refused, nothing is handled        |
|           | START_TLS, or part of a frame      |           |                                                      |
| CLEAR     | `accept`                           | ACCEPTED  | START_TLS is answered once its batch was handled     |
| ACCEPTED  | `begin`, responses are unsent      | CLEAR     | the connection is refused                            |
| ACCEPTED  | `begin`, it is being closed        | CLEAR     | nothing                                              |
| ACCEPTED  | `begin`, AUTH may follow in clear  | DRAINING  | START_TLS is answered; frames in clear are awaited   |
| ACCEPTED  | `begin`, otherwise                 | HANDSHAKE | START_TLS is answered; the handshake begins          |
| DRAINING  | frames: only AUTH                  | DRAINING  | AUTH is held                                         |
| DRAINING  | frames: anything else              | DRAINING  | the connection is refused                            |
| DRAINING  | `shake`                            | HANDSHAKE | the handshake begins                                 |
| DRAINING, | response to send                   | same      | it is held, and sent encrypted later                 |
| HANDSHAKE | decrypted bytes                    | same      | they are held: the handshake may not be reported yet |
| HANDSHAKE | `secured`                          | SECURE    | what was held is released: responses, AUTH, bytes    |
| SECURE    | `accept`                           | SECURE    | BAD_REQUEST                                          |

AUTH may follow in clear if the client still has to authenticate and TLS is not required, so that a token in clear is
good enough: Apache's client sends its first AUTH behind START_TLS without waiting for the response
(AuthHandler.ClientSideHandler.channelActive). A failed handshake has no row: the connection is refused and ends.

Invariant: a request that was received in clear behind START_TLS is never handled before the connection is secure, and
afterwards only if it is AUTH. Otherwise an attacker on the network could insert requests before the encryption begins,
and they would be executed afterwards as requests of the authenticated client.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from bindery_core.errors import BadRequest, BinderyError, Unauthorized
from bindery_core.wire import v2, v3
from bindery_core.wire.detection import Codec
from bindery_core.wire.messages import AuthRequest, Request, StartTlsRequest


class TlsState(Enum):
    """The state of one connection, as in the table of the module."""

    CLEAR = auto()
    ACCEPTED = auto()
    DRAINING = auto()
    HANDSHAKE = auto()
    SECURE = auto()


@dataclass(frozen=True, slots=True)
class Batch:
    """The decision about received requests: handle these, or refuse the connection."""

    in_v3: list[Request]
    in_v2: list[Request]
    refuse: BinderyError | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """Items held during the upgrade, to be processed in the order of the fields."""

    responses: list[bytes] = field(default_factory=list)
    auth: list[tuple[list[Request], Codec]] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)


class TlsUpgrade:
    """The upgrade of one connection. `is_offered`: this bookie has a certificate. `is_required`: it requires TLS."""

    __slots__ = (
        "_auth",
        "_data",
        "_is_offered",
        "_is_required",
        "_responses",
        "_txn_id",
        "is_in_progress",
        "may_begin",
        "state",
    )

    def __init__(self, *, is_offered: bool, is_required: bool) -> None:
        self._is_offered = is_offered
        self._is_required = is_required
        self.state = TlsState.CLEAR
        self.is_in_progress = False
        """True from the answer to START_TLS to the end of the handshake: only AUTH may still arrive in clear."""
        self.may_begin = is_offered
        """Whether START_TLS would be accepted. False: `receive` passes all requests, and need not be called."""
        self._txn_id = 0
        self._responses: list[bytes] = []
        self._auth: list[tuple[list[Request], Codec]] = []
        self._data: list[bytes] = []

    def _enter(self, state: TlsState) -> None:
        self.state = state
        self.is_in_progress = state is TlsState.DRAINING or state is TlsState.HANDSHAKE
        self.may_begin = self._is_offered and state is TlsState.CLEAR

    @property
    def is_begun(self) -> bool:
        """True from the acceptance of START_TLS to the end of the handshake."""
        return self.state is TlsState.ACCEPTED or self.is_in_progress

    @property
    def is_draining(self) -> bool:
        """True while frames in clear are awaited, before the handshake begins."""
        return self.state is TlsState.DRAINING

    def receive(self, in_v3: list[Request], in_v2: list[Request], *, has_partial_frame: bool) -> Batch:
        """Decide about requests that were decoded together; those in v3 come first."""
        if not self.may_begin:
            return Batch(in_v3, in_v2)
        at = next((at for at, request in enumerate(in_v3) if type(request) is StartTlsRequest), None)
        if at is None or (at == len(in_v3) - 1 and not in_v2 and not has_partial_frame):
            return Batch(in_v3, in_v2)
        behind = in_v3[at + 1 :]
        if reason := self._reason_to_refuse([*behind, *in_v2], has_partial_frame=has_partial_frame):
            return Batch([], [], reason)
        self._hold_auth(behind, in_v2)
        return Batch(in_v3[: at + 1], [])

    def accept(self, txn_id: int) -> bool:
        """Handle START_TLS. Return False: answer BAD_REQUEST. True: call `begin` once its batch was handled."""
        if not self.may_begin:
            return False
        self._enter(TlsState.ACCEPTED)
        self._txn_id = txn_id
        return True

    def begin(self, *, is_closing: bool, has_unsent: bool, must_authenticate: bool) -> int | BinderyError | None:
        """Begin the upgrade after a batch, if START_TLS was accepted in it.

        Return the transaction id with which to answer START_TLS; an error if the connection must be refused; None if
        there is nothing to begin.
        """
        if self.state is not TlsState.ACCEPTED:
            return None
        self._enter(TlsState.CLEAR)
        if is_closing:
            return None
        if has_unsent:
            return BadRequest("START_TLS while responses are unread")
        self._enter(TlsState.DRAINING if must_authenticate and not self._is_required else TlsState.HANDSHAKE)
        return self._txn_id

    def drain(self, in_v3: list[Request], in_v2: list[Request], *, has_partial_frame: bool) -> BinderyError | None:
        """Hold requests that arrived in clear after the answer to START_TLS, or return why to refuse the connection."""
        assert self.state is TlsState.DRAINING
        if reason := self._reason_to_refuse([*in_v3, *in_v2], has_partial_frame=has_partial_frame):
            return reason
        self._hold_auth(in_v3, in_v2)
        return None

    def shake(self) -> None:
        """Record that the handshake begins."""
        assert self.is_in_progress
        self._enter(TlsState.HANDSHAKE)

    def hold_response(self, response: bytes) -> bool:
        """Hold a response until the connection is secure. False: write it now."""
        if self.is_in_progress:
            self._responses.append(response)
        return self.is_in_progress

    def hold_data(self, data: bytes) -> bool:
        """Hold decrypted bytes until the handshake is reported. False: decode them now."""
        if self.is_in_progress:
            self._data.append(data)
        return self.is_in_progress

    def secured(self) -> Released:
        """Record that the handshake has succeeded, and return what was held."""
        assert self.state is TlsState.HANDSHAKE
        self._enter(TlsState.SECURE)
        released = Released(self._responses, self._auth, self._data)
        self._responses, self._auth, self._data = [], [], []
        return released

    def lose(self) -> None:
        """Drop what is held, because the connection is gone."""
        self._responses, self._auth, self._data = [], [], []

    def _hold_auth(self, in_v3: list[Request], in_v2: list[Request]) -> None:
        self._auth += [(requests, codec) for requests, codec in ((in_v3, v3), (in_v2, v2)) if requests]

    def _reason_to_refuse(self, behind: Sequence[Request], *, has_partial_frame: bool) -> BinderyError | None:
        """Return why a connection must end if these requests came in clear behind START_TLS; None if it need not."""
        if has_partial_frame or any(type(request) is not AuthRequest for request in behind):
            return BadRequest("bytes in clear behind START_TLS")
        if self._is_required:
            return Unauthorized("a token was sent in clear: TLS is required")
        return None
