"""Lets test modules import the helper modules of this folder, and those of the bookie's tests; fakes HTTP servers."""

import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "services" / "bookie" / "tests"))


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[httpx.Request], httpx.Response]], None]:
    """Let a function answer all requests."""
    client = httpx.Client

    def answer(handler: Callable[[httpx.Request], httpx.Response]) -> None:
        monkeypatch.setattr(
            httpx, "Client", lambda **options: client(**options, transport=httpx.MockTransport(handler))
        )

    return answer
