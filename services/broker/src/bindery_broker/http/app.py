"""The broker's application: the FastAPI app of all APIs, behind the gate."""

from collections.abc import Awaitable
from typing import Any, cast

from bindery_kit.http.problem_fastapi import install_refusals
from bindery_kit.http.upgrade import UPGRADE
from bindery_kit.limits.held_bytes import HeldBytes
from bindery_kit.multiplex.served import ServedRequests
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from bindery_broker import __doc__ as package_doc
from bindery_broker.broker import Broker
from bindery_broker.http import admin, openapi, page, v1
from bindery_broker.http.at_owner import AtOwner
from bindery_broker.http.budget import ByteBudget
from bindery_broker.http.charging.allowance import Limiter
from bindery_broker.http.exchange import has_reasons, reason_reply
from bindery_broker.http.gate import Carry, Gate, HotRoutes
from bindery_broker.http.peers.assignments import Assignments
from bindery_broker.http.peers.joining import Joining
from bindery_broker.http.peers.moves import Peers
from bindery_broker.http.peers.retries import RemoteRetries
from bindery_broker.http.peers.senders import Senders
from bindery_broker.http.peers.transport import PEERS_PATH
from bindery_broker.http.peers.unloads import Unloads
from bindery_broker.http.proxy import Proxy
from bindery_broker.http.route import HotRoute
from bindery_broker.http.v1.partitioned.operations import PartitionedOperations

API_VERSION = "1.0.0"


class BrokerApp(FastAPI):
    """Serves one broker until `close`."""

    def __init__(
        self,
        broker: Broker,
        *,
        proxy: Proxy | None = None,
        arriving: HeldBytes | None = None,
        served: ServedRequests | None = None,
    ) -> None:
        """`arriving`: the bodies that the port receives, which share `in_flight_bytes_max` with complete ones.
        `served`: the requests that other brokers send over common connections, for the metrics."""
        super().__init__(
            title="Bindery broker",
            version=API_VERSION,
            description=f"{package_doc or ''}\n\nErrors are RFC 9457 problems with a stable `code`. Message ids are "
            "`ledgerId:entryId:partition:batchIndex`, -1 where there is none.",
            docs_url=None,  # FastAPI's page loads scripts from a CDN; `_docs` does not
            redoc_url=None,
            redirect_slashes=False,
            # Not include_router: it matches each request twice, route by route, for options that are not used here.
            routes=[route for router in (*v1.ROUTERS, *admin.ROUTERS) for route in router.routes],
        )
        self._broker = broker
        self._proxy = proxy or Proxy()
        self.limiter = Limiter(broker.accounts, by_address=broker.settings.limits.by_address, now=broker.now)
        self._proxy.passing_headers = self.limiter.passing_headers
        broker.topics.admit_new = broker.partitioned.admit_new = self.limiter.create_topics
        broker.topics.targets.peers = Peers(self._proxy)
        self._retries = RemoteRetries(self._proxy, prefix=f"via-{broker.store.session_id:x}", now=broker.now)
        broker.retry_topics.peers = self._retries
        broker.partitioned_consumers.peers = self._retries
        assignments = Assignments(broker, self._proxy, Unloads(broker, self._proxy))
        broker.ownership.assigner = broker.balancing.peers = assignments
        self._budget = ByteBudget(broker.settings.in_flight_bytes_max, arriving=arriving)
        broker.metrics.in_flight_bytes.set_function(lambda: self._budget.used)
        self.add_api_route("/docs", self._docs, include_in_schema=False)
        install_refusals(self, validation_code="bad_request")
        refuse = self.exception_handlers[HTTPException]

        async def on_http_exception(request: Request, error: HTTPException) -> Response:
            if not has_reasons(request.url.path.encode()):
                return await cast(Awaitable[Response], refuse(request, error))
            answer = reason_reply(error.status_code, f"{error.detail}: {request.method} {request.url.path}")
            for name, value in (error.headers or {}).items():
                answer.raw_headers.append((name.lower().encode(), value.encode()))
            return answer

        self.add_exception_handler(HTTPException, on_http_exception)  # type: ignore[arg-type]
        routes = [route for router in v1.ROUTERS for route in router.routes if isinstance(route, HotRoute)]
        self.add_middleware(Carry)
        broker.metrics.watch_peers(self._proxy.links, served)
        creating = v1.CREATES_TOPIC | admin.CREATES_TOPIC
        at_owner = AtOwner(
            broker, self._proxy, creating=creating, partitioned=PartitionedOperations(admin.ON_PARTITIONED)
        )
        senders = Senders(
            self.limiter,
            own_role=lambda: self._proxy.own_role,
            must_authenticate=broker.settings.auth.is_set,
        )
        self._joining = Joining(senders)
        self._gate = Gate(
            super().__call__,
            at_owner=at_owner,
            budget=self._budget,
            routes=HotRoutes(routes),
            limiter=self.limiter,
            senders=senders,
        )
        at_owner.app = self._gate
        self.drain = at_owner.drain
        """Hands over all bundles of this broker."""
        broker.deletions.delete_topic = at_owner.delete_topic

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = openapi.complete(super().openapi(), v1.STRUCTS)
        return self.openapi_schema

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:  # type: ignore[override]
        if scope["type"] == "websocket":
            return send({"type": "websocket.close", "code": 1008})
        if UPGRADE in scope.get("extensions", ()) and scope["path"] == PEERS_PATH:
            return self._joining(scope, receive, send)
        return self._gate(scope, receive, send)

    async def close(self) -> None:
        await self.drain.close()
        await self._broker.deletions.close()
        await self._retries.close()
        await self._proxy.close()

    async def _docs(self) -> Response:
        return HTMLResponse(page.page(self.openapi()), headers=page.HEADERS)
