"""Measure what a request costs that one broker passes on to another, over common connections and over HTTP/1.1.

    python bench/passing.py [--requests 2000] [--rounds 5] [--at-once 32]

Both ends run in this process: the proxy of a broker, and an HTTP port with an application that answers at once, so that
the time is that of passing on alone. Rounds of both kinds alternate, and the ratio of the medians is printed.
"""

import argparse
import asyncio
import statistics
from typing import Any

from bindery_broker.http.proxy import Proxy
from bindery_kit.http.http_server import HttpServer
from bindery_kit.http.upgrade import UPGRADE
from bindery_kit.multiplex.served import Multiplexing

BODY = b'{"message_ids":["1:2:-1:-1"]}\n'


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    if UPGRADE in scope.get("extensions", ()):
        scope["extensions"][UPGRADE]()
        return
    while (await receive())["more_body"]:
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": BODY})


async def _round(proxy: Proxy, url: str, *, requests: int, at_once: int) -> float:
    """Return the microseconds per request."""
    left = requests

    async def some() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            status, _ = await proxy.call("POST", url, "/v1/topics/public/default/t/messages", bytes(100))
            assert status == 200

    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(some() for _ in range(at_once)))
    return (loop.time() - began) / requests * 1e6


async def _measure(*, requests: int, rounds: int, at_once: int) -> None:
    multiplexing = Multiplexing(requests_max=10_000, of_connection_max=4_096)
    async with HttpServer(_answer, port=0, lifespan="off", upgrade=multiplexing) as server:
        proxies = {"common connections": Proxy(links_max=2), "HTTP/1.1": Proxy(links_max=0)}
        times: dict[str, list[float]] = {name: [] for name in proxies}
        for number in range(rounds + 1):
            for name, proxy in proxies.items():
                took = await _round(proxy, server.url, requests=requests, at_once=at_once)
                if number:  # the first round opens connections
                    times[name].append(took)
        for name, found in times.items():
            shown = ", ".join(f"{one:.0f}" for one in found)
            print(f"{name}: {statistics.median(found):.0f} us per request (rounds: {shown})")
        new, old = (statistics.median(found) for found in times.values())
        print(f"ratio: {new / old:.2f} of HTTP/1.1, with {at_once} requests at once")
        for proxy in proxies.values():
            await proxy.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=32)
    options = parser.parse_args()
    asyncio.run(_measure(requests=options.requests, rounds=options.rounds, at_once=options.at_once))


if __name__ == "__main__":
    main()
