"""A faulty proxy in front of a correct broker: it injects one kind of error at every third opportunity.

| lie           | effect                                                                    | required finding       |
|---------------|---------------------------------------------------------------------------|------------------------|
| none          | forwards everything                                                       | none                   |
| drop          | acknowledges messages without storing them                                | lost, undelivered      |
| hide          | leaves messages out of readings                                           | lost                   |
| double        | stores a request twice                                                    | duplicate              |
| change        | stores other payloads                                                     | changed                |
| deny          | stores messages and responds that it refused them                         | phantom                |
| invent        | stores messages of its own                                                | phantom                |
| swap          | swaps neighbouring messages in readings                                   | reordered              |
| shuffle       | delivers the messages of a response in reverse order                      | reordered              |
| forget        | confirms acknowledgements without executing them                          | redelivered            |
| withhold      | acknowledges messages of a subscription itself, and never delivers them   | undelivered            |
"""

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

LIES: Final = {
    "none": set(),
    "drop": {"lost", "undelivered"},
    "hide": {"lost"},
    "double": {"duplicate"},
    "change": {"changed"},
    "deny": {"phantom"},
    "invent": {"phantom"},
    "swap": {"reordered"},
    "shuffle": {"reordered"},
    "forget": {"redelivered"},
    "withhold": {"undelivered"},
}
EVERY: Final = 3


class Liar:
    def __init__(self, url: str, lie: str, *, http: httpx.AsyncClient) -> None:
        self._url = url
        self._lie = lie
        self._http = http
        self._chances = 0
        self.lies = 0

    def _now(self, *lies: str) -> bool:
        """Whether to inject an error at this opportunity."""
        if self._lie not in lies:
            return False
        self._chances += 1
        if self._chances % EVERY:
            return False
        self.lies += 1
        return True

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        path = request.url.path
        if request.method == "POST" and path.endswith("/messages"):
            return await self._produce(request, body)
        if request.method == "GET" and path.endswith("/messages"):
            return self._read(await self._pass(request, body))
        if path.endswith("/receive"):
            return await self._receive(request, await self._pass(request, body))
        if path.endswith("/ack") and self._now("forget"):
            return JSONResponse({"acknowledged": len(json.loads(body)["message_ids"])})
        return reply(await self._pass(request, body))

    async def _pass(self, request: Request, body: bytes) -> httpx.Response:
        headers = {k: v for k, v in request.headers.items() if k not in ("host", "content-length", "connection")}
        url = f"{self._url}{request.url.path}?{request.url.query}"
        return await self._http.request(request.method, url, content=body, headers=headers)

    async def _produce(self, request: Request, body: bytes) -> Response:
        count = len(body.split(b"\n")) if request.headers["content-type"] == "application/x-ndjson" else 1
        if self._now("drop"):
            return JSONResponse({"message_ids": [f"99999:{self._chances}:-1:{index}" for index in range(count)]})
        if self._now("double"):
            await self._pass(request, body)
        if self._now("invent"):
            await self._http.post(f"{self._url}{request.url.path}", content=b"nobody said this")
        if self._now("change"):
            body = flipped(body) if count == 1 and body[:1] != b"{" else changed_line(body)
        answer = await self._pass(request, body)
        if self._now("deny"):
            problem = {
                "type": "about:blank",
                "title": "no",
                "status": 503,
                "code": "not_enough_bookies",
                "detail": "no",
            }
            return JSONResponse(problem, 503, media_type="application/problem+json")
        return reply(answer)

    def _read(self, answer: httpx.Response) -> Response:
        def cheat(messages: list[Any]) -> None:
            if len(messages) > 3 and self._lie == "swap":
                self.lies += 1
                messages[1], messages[2] = messages[2], messages[1]
            if len(messages) > 1 and self._lie == "hide":
                self.lies += 1
                del messages[1]

        return edited(answer, cheat)

    async def _receive(self, request: Request, answer: httpx.Response) -> Response:
        withheld: list[str] = []

        def cheat(messages: list[Any]) -> None:
            if len(messages) > 1 and self._lie == "shuffle":
                self.lies += 1
                messages.reverse()
            if messages and self._now("withhold"):
                withheld.append(messages.pop()["message_id"])

        edited_answer = edited(answer, cheat)
        if withheld:
            path = request.url.path.removesuffix("/receive") + "/ack"
            await self._http.post(f"{self._url}{path}", json={"message_ids": withheld})
        return edited_answer


def flipped(body: bytes) -> bytes:
    return bytes([body[0] ^ 1]) + body[1:] if body else b"something"


def changed_line(body: bytes) -> bytes:
    lines = body.split(b"\n")
    first = json.loads(lines[0])
    first["payload_base64"] = base64.b64encode(flipped(base64.b64decode(first["payload_base64"]))).decode()
    return b"\n".join([json.dumps(first).encode(), *lines[1:]])


def reply(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


def edited(answer: httpx.Response, cheat: Callable[[list[Any]], None]) -> Response:
    if answer.status_code != 200:
        return reply(answer)
    body = answer.json()
    cheat(body["messages"])
    return JSONResponse(body)


@asynccontextmanager
async def lying_broker(url: str, lie: str) -> AsyncIterator[tuple[Liar, str]]:
    """Run the proxy for the broker at `url`; yields (proxy, its URL)."""
    listening = socket.create_server(("127.0.0.1", 0))
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        liar = Liar(url, lie, http=http)
        route = Route("/{path:path}", liar.answer, methods=["GET", "PUT", "POST"])
        config = uvicorn.Config(Starlette(routes=[route]), log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield liar, f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
