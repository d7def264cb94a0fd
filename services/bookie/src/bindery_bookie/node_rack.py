"""`bindery-bookie-rack`: write the rack of a bookie on Kubernetes to a file: a label of the node that runs its pod.

    bindery-bookie-rack FILE LABEL

The chart runs this in an init container, the only one of the pod with a token for the Kubernetes API; its account may
only `get` nodes. The bookie reads the file at its start (BOOKIE_RACK_FILE) and announces the rack.

| variable                                          | content                                          |
|---------------------------------------------------|--------------------------------------------------|
| NODE_NAME                                         | name of the node                                 |
| KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT  | the API, set by Kubernetes                       |
| BINDERY_ACCOUNT_DIRECTORY                         | directory with `token` and `ca.crt`; empty: that |
|                                                   | of Kubernetes                                    |

| result                                            | file                                             |
|---------------------------------------------------|--------------------------------------------------|
| the node has the label                            | `/<value of the label>`                          |
| the node does not have it                         | empty                                            |
| the API refuses the request                       | none                                             |
| the API does not answer within LIMIT_S            | none                                             |

The exit code is 0 in all these cases, because a bookie without a rack is better than no bookie: without a rack in the
file, the entry of an earlier start in the record of racks stays in force. One line on stderr reports the result.
"""

import http.client
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from bindery_core.errors import BadRequest, BinderyError
from bindery_identity.tls import client_tls

PROGRAM: Final = "bindery-bookie-rack"
ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Default directory of the files with which a pod authenticates to the Kubernetes API."""
LIMIT_S: Final = 60.0
"""Seconds after which the program gives up."""
TIMEOUT_S: Final = 5.0
"""Timeout in seconds of one request."""
PAUSE_S: Final = 2.0
"""Seconds between two requests."""
ANSWER_SIZE_MAX: Final = 1024 * 1024
"""Maximum number of bytes of an answer that are read."""
ONLY_METADATA: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Media type of a node without its status, which can be large."""

_NODE = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class NotRead(BinderyError):
    """The label could not be read. `may_help`: whether another attempt may help."""

    code = "node_not_read"

    def __init__(self, text: str, *, may_help: bool = False) -> None:
        super().__init__(text)
        self.may_help = may_help


class Api(Protocol):
    """The Kubernetes API."""

    def get(self, path: str) -> tuple[int, bytes]:
        """Return the status and the body. Raises OSError, http.client.HTTPException."""
        ...


class PodApi:
    """The Kubernetes API with the account of this pod."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises BadRequest outside of a pod."""
        account = Path(environment.get("BINDERY_ACCOUNT_DIRECTORY") or ACCOUNT)
        self._host = environment.get("KUBERNETES_SERVICE_HOST", "")
        self._port = environment.get("KUBERNETES_SERVICE_PORT", "443")
        self._token = account / "token"
        if not self._host or not self._port.isdecimal():
            raise BadRequest("this is no pod: KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is not set")
        self._tls = client_tls(ca_file=str(account / "ca.crt"))

    def get(self, path: str) -> tuple[int, bytes]:
        token = self._token.read_text().strip()
        connection = http.client.HTTPSConnection(
            self._host, int(self._port), timeout=TIMEOUT_S, context=self._tls.context
        )
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}", "Accept": ONLY_METADATA})
            answer = connection.getresponse()
            return answer.status, answer.read(ANSWER_SIZE_MAX + 1)
        finally:
            connection.close()


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 2 or words[0].startswith("-"):
        sys.stdout.write(__doc__ or "")
        return 0 if list(words) in (["--help"], ["-h"]) else 2
    file, label = words
    try:
        api = PodApi(os.environ)
        result = write_rack(api, Path(file), label, node=os.environ.get("NODE_NAME", ""), clock=time)
    except (BinderyError, OSError) as error:
        result = f"the rack is unknown: {error}; the bookie starts without one, or with that of its last start"
    sys.stderr.write(f"{PROGRAM}: {result}\n")
    sys.stderr.flush()
    return 0


class Clock(Protocol):
    """The part of the module `time` that is used."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


def write_rack(
    api: Api,
    file: Path,
    label: str,
    *,
    node: str,
    clock: Clock,
) -> str:
    """Write the rack and return a sentence about the result. Raises BadRequest, NotRead, OSError."""
    if not _NODE.fullmatch(node):
        raise BadRequest("NODE_NAME is not the name of a node", given=node[:100])
    give_up_at = clock.monotonic() + LIMIT_S
    while True:
        try:
            zone = read_label(api, node, label)
            break
        except NotRead as error:
            if not error.may_help or clock.monotonic() >= give_up_at:
                raise
        clock.sleep(PAUSE_S)
    file.write_text(f"/{zone}\n" if zone else "")
    if not zone:
        return f"node {node} has no label {label}: the bookie has no rack; add the label, then restart the pod"
    return f"the rack is /{zone}, from the label {label} of node {node}"


def read_label(api: Api, node: str, label: str) -> str:
    """Return the value of a label of a node; empty if it does not have it. Raises NotRead."""
    try:
        status, body = api.get(f"/api/v1/nodes/{node}")
    except (OSError, http.client.HTTPException) as error:
        raise NotRead(f"the Kubernetes API does not answer: {error}", may_help=True) from error
    if status in (401, 403):
        raise NotRead(f"the Kubernetes API refused to read node {node} ({status}): check the bookies' ClusterRole")
    if status == 404:
        raise NotRead(f"the Kubernetes API knows no node {node}")
    if status != 200 or len(body) > ANSWER_SIZE_MAX:
        raise NotRead(f"the Kubernetes API answered {status} with {len(body)} bytes", may_help=True)
    try:
        found: Any = json.loads(body)
        labels = found["metadata"].get("labels") or {}
        value = labels.get(label, "")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotRead(f"the Kubernetes API answered something else than a node: {error}") from error
    if not isinstance(value, str):
        raise NotRead(f"the label {label} of node {node} is no text")
    return value


if __name__ == "__main__":
    sys.exit(main())
