"""Find a URL under which this machine reaches a broker.

| source, in order     | condition                                                                                    |
|----------------------|----------------------------------------------------------------------------------------------|
| BINDERY_E2E_URL      | the variable is set                                                                          |
| port of a node       | the service has a node port and a node accepts connections; control plane nodes come first   |
| kubectl port-forward | otherwise; it ends with its pod and is then restarted                                        |
"""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Final

from bindery_e2e.cluster.cluster import API_TIMEOUT_S, Cluster, ClusterError

CONNECT_TIMEOUT_S: Final = 2.0
FORWARD_TIMEOUT_S: Final = 15.0


def accepts_connections(host: str, port: int) -> bool:
    """Whether a process accepts TCP connections on host and port."""
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


class BrokerEndpoint:
    """Await an instance for a base URL; call `close` at the end. Raises ClusterError while no broker is reachable."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        environment: Callable[[str], str | None] = os.environ.get,
        reachable: Callable[[str, int], bool] = accepts_connections,
    ) -> None:
        self._cluster = cluster
        self._fixed = environment("BINDERY_E2E_URL") or ""
        self._reachable = reachable
        self._forward: subprocess.Popen[str] | None = None
        self._forward_url = ""

    async def __call__(self) -> str:
        return await asyncio.to_thread(self.url)

    def url(self) -> str:
        if self._fixed:
            return self._fixed
        port = self._node_port()
        if port:
            for address in self._cluster.node_addresses().values():
                if self._reachable(address, port):
                    return f"http://{address}:{port}"
        return self._forwarded()

    def close(self) -> None:
        if self._forward is not None:
            self._forward.kill()
            self._forward.wait()
            self._forward = None

    def _node_port(self) -> int:
        service = self._cluster.core.read_namespaced_service(
            f"{self._cluster.fullname}-broker", self._cluster.namespace, _request_timeout=API_TIMEOUT_S
        )
        return int(service.spec.ports[0].node_port or 0)

    def _forwarded(self) -> str:
        if self._forward is not None and self._forward.poll() is None and self._forward_url:
            port = int(self._forward_url.rsplit(":", 1)[1])
            if self._reachable("127.0.0.1", port):
                return self._forward_url
        self.close()
        self._forward = subprocess.Popen(
            [
                "kubectl",
                "-n",
                self._cluster.namespace,
                "port-forward",
                f"service/{self._cluster.fullname}-broker",
                ":8080",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self._forward_url = self._announced(self._forward)
        return self._forward_url

    def _announced(self, forward: "subprocess.Popen[str]") -> str:
        """The URL from its first line, `Forwarding from 127.0.0.1:NNNNN -> 8080`."""
        assert forward.stdout is not None
        os.set_blocking(forward.stdout.fileno(), False)
        deadline, text = time.monotonic() + FORWARD_TIMEOUT_S, ""
        while time.monotonic() < deadline and forward.poll() is None:
            with contextlib.suppress(TypeError, BlockingIOError):
                text += forward.stdout.read() or ""
            if found := re.search(r"127\.0\.0\.1:(\d+)", text):
                return f"http://127.0.0.1:{found[1]}"
            time.sleep(0.1)
        self.close()
        raise ClusterError("kubectl port-forward to the broker does not come up: no broker is ready")
