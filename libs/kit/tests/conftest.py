"""A FastAPI application, and a server for it, for tests of HTTP."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from bindery_core.errors import BinderyError, DamagedStorage, NoSuchTopic, TooManyRequests
from bindery_kit.http.http_server import HttpServer
from bindery_kit.http.problem import problem_of
from bindery_kit.http.problem_fastapi import install_refusals
from bindery_kit.observability.health import Health, OpsApp
from bindery_kit.observability.metrics import Metrics
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parent))


class Body(BaseModel):
    count: int


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    install_refusals(app)

    @app.exception_handler(BinderyError)
    async def on_error(_: Request, error: BinderyError) -> Response:
        return problem_of(error)

    @app.get("/fail/{kind}")
    async def fail(kind: str) -> None:
        raise {
            "missing": NoSuchTopic("no such topic", topic="a/b/c"),
            "busy": TooManyRequests("too many requests", bytes_in_flight=7),
            "damaged": DamagedStorage("bad file", path="x"),
        }[kind]

    @app.post("/count")
    async def count(body: Body) -> int:
        return body.count

    @app.get("/slow")
    async def slow() -> str:
        await asyncio.sleep(60)
        return "late"

    return app


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
async def client(health: Health, app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    metrics = Metrics("kittest")
    metrics.counter("adds_total", "adds").inc(3)
    metrics.histogram("add_seconds", "latency").observe(0.003)
    async with (
        HttpServer(OpsApp(health, metrics, app=app), port=0) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        yield http
