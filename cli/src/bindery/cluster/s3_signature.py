"""Sign a request to an S3 store: AWS Signature Version 4, in the `Authorization` header. Pure.

The signature covers the method, the path, the query, the headers host and x-amz-..., and the SHA-256 of the content.
Source: "Authenticating Requests: Using the Authorization Header" of Amazon's S3 API reference.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

ALGORITHM: Final = "AWS4-HMAC-SHA256"
SERVICE: Final = "s3"


@dataclass(frozen=True, slots=True, repr=False)
class S3Key:
    """Credentials of an S3 store. `session_token`: of temporary credentials; empty: none."""

    access_key_id: str
    secret_access_key: str
    session_token: str = ""
    region: str = "us-east-1"


def signed_headers(
    method: str,
    url: str,
    *,
    payload_sha256: str,
    key: S3Key,
    now: datetime,
    headers: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the headers to add to the request. `now`: in UTC. `headers`: further ones that the signature covers."""
    parts = urlsplit(url)
    moment = f"{now:%Y%m%dT%H%M%SZ}"
    added = {"x-amz-content-sha256": payload_sha256, "x-amz-date": moment}
    if key.session_token:
        added["x-amz-security-token"] = key.session_token
    covered = {"host": parts.netloc.rpartition("@")[2], **added}
    covered |= {name.lower(): " ".join(value.split()) for name, value in (headers or {}).items()}
    names = ";".join(sorted(covered))
    query = sorted(
        (quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in parse_qsl(parts.query, True)
    )
    request = "\n".join(
        [
            method,
            quote(unquote(parts.path) or "/", safe="/-_.~"),
            "&".join(f"{name}={value}" for name, value in query),
            *(f"{name}:{covered[name]}" for name in sorted(covered)),
            "",
            names,
            payload_sha256,
        ]
    )
    scope = f"{now:%Y%m%d}/{key.region}/{SERVICE}/aws4_request"
    text = "\n".join([ALGORITHM, moment, scope, hashlib.sha256(request.encode()).hexdigest()])
    signing = f"AWS4{key.secret_access_key}".encode()
    for part in scope.split("/"):
        signing = hmac.digest(signing, part.encode(), "sha256")
    signature = hmac.digest(signing, text.encode(), "sha256").hex()
    credential = f"{key.access_key_id}/{scope}"
    return {
        **added,
        "Authorization": f"{ALGORITHM} Credential={credential},SignedHeaders={names},Signature={signature}",
    }
