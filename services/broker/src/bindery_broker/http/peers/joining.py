"""Accept connections of other brokers, over which they pass many requests on (`bindery_kit.multiplex`).

The request that begins one has passed the checks of the port, and authentication if that is required. Then only brokers
may continue: those with the role of this broker's own token, or with the key that all brokers share (`senders`). Each
request inside passes the same checks and the authentication with its own headers, so that such a connection allows
nothing that a connection of its own would not.
"""

from bindery_core.errors import Forbidden, TryAgain
from bindery_kit.access.audit_trail import entry_of
from bindery_kit.http.problem import problem_of
from bindery_kit.http.request_id import RequestIds
from bindery_kit.http.upgrade import UPGRADE
from starlette.types import Receive, Scope, Send

from bindery_broker.http.peers.senders import Senders


class Joining:
    def __init__(self, senders: Senders) -> None:
        self._senders = senders
        self._ids = RequestIds(prefix="peer-")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: Forbidden | TryAgain = Forbidden("only brokers of this cluster may send requests over one connection")
        if self._senders.may_join(scope):
            if scope["extensions"][UPGRADE]():
                return
            error = TryAgain("the connection cannot be continued; open another one")
        if (entry := entry_of(scope)) is not None:
            entry.code = error.code
        response = problem_of(error)
        response.headers["x-request-id"] = self._ids.of(scope)
        await response(scope, receive, send)
