"""Start services that record each request, and serve what the origin check refuses: proof that attempts arrive.

`environment` makes every Python process load a module that waits for the import of `bindery_kit.http.origin`, and then
replaces its verdicts. No product has such a switch.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

RECORD: Final = "BINDERY_TEST_REQUESTS"
_SITE: Final = """
import importlib.util, json, os, re, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "bindery_kit.http.origin":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            judge = module.OriginPolicy.refusal
            file = os.open(os.environ["{record}"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

            def refusal(policy, scope):
                error = judge(policy, scope)
                headers = {{name.decode(): value.decode("latin-1") for name, value in scope["headers"]}}
                query = scope["query_string"].decode("latin-1")
                line = json.dumps([scope["method"], scope["path"], query, headers, error and error.code])
                os.write(file, line.encode() + b"\\n")
                scope["query_string"] = re.sub(rb"&?attack=[^&]*$", b"", scope["query_string"])
                return error if {is_guarded} else None

            module.OriginPolicy.refusal = refusal

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request that a service got. `verdict`: the code of the refusal of the origin check; None: it is allowed."""

    method: str
    path: str
    attempt: str
    """Id of the attempt; empty for other clients."""
    headers: dict[str, str]
    verdict: str | None


def environment(directory: Path, *, is_guarded: bool = False) -> dict[str, str]:
    """Return variables for services that record their requests in `directory`. `is_guarded`: and refuse as always."""
    site = directory / "site"
    site.mkdir()
    record = directory / "requests"
    (site / "sitecustomize.py").write_text(_SITE.format(record=RECORD, is_guarded=is_guarded))
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, RECORD: str(record)}


def recorded(directory: Path) -> Sequence[Recorded]:
    """Return the requests that all services got so far."""
    found = []
    for line in (directory / "requests").read_text().splitlines():
        method, path, query, headers, verdict = json.loads(line)
        found.append(Recorded(method, path, parse_qs(query).get("attack", [""])[0], headers, verdict))
    return found
