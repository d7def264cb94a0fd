"""Send a backup to a store outside of the cluster by one HTTP PUT: object stores, WebDAV, or a service of your own.

A folder, usually a mounted Secret, describes the store:

| file              | content                                                                                          |
|-------------------|--------------------------------------------------------------------------------------------------|
| url               | URL of the PUT. `{name}` is replaced by the name of the backup; a URL that ends in `/` gets it  |
|                   | appended; any other URL is used as it is                                                         |
| headers           | optional: one `Name: value` per line, such as `Authorization: Bearer ...`                        |
| ca.crt            | optional: authorities of the store's certificate (PEM); default: the public ones                 |
| access-key-id,    | optional: credentials of an S3 store. The request is then signed (`s3_signature`);               |
| secret-access-key,| `session-token` may be missing, `region` is us-east-1 by default                                 |
| session-token,    |                                                                                                  |
| region            |                                                                                                  |

URL and headers may contain secrets: messages contain the URL without its query, and no headers. Redirects are refused,
because they would send the headers to another host. How many backups a store keeps is a rule of the store.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import httpx
from bindery_core.backoff import Backoff
from bindery_core.errors import BadRequest, TryAgain
from bindery_identity.tls import client_tls

from bindery.cluster.s3_signature import S3Key, signed_headers

ATTEMPTS_MAX: Final = 4
"""Maximum number of attempts of one upload."""
TIMEOUT_S: Final = 60.0
"""Maximum time in seconds without progress of an upload."""
FILE_SIZE_MAX: Final = 64 * 1024
"""Maximum number of bytes of each file that describes a store."""
ANSWER_SIZE_MAX: Final = 300
"""Maximum number of characters of a store's answer in a message."""
AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the upload is repeated."""


class NotUploaded(TryAgain):
    """The store did not take the backup."""

    code = "backup_not_uploaded"


@dataclass(frozen=True, slots=True, repr=False)
class Store:
    """A store of backups."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    ca_file: str = ""
    key: S3Key | None = None
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    @classmethod
    def of(cls, folder: str) -> "Store":
        """Read the folder. Raises BadRequest."""
        known = {
            name: _content(Path(folder) / name)
            for name in ("url", "headers", "access-key-id", "secret-access-key", "session-token", "region")
        }
        url = known["url"]
        try:
            is_valid = httpx.URL(url).scheme in ("http", "https") and bool(httpx.URL(url).host)
        except httpx.InvalidURL:
            is_valid = False
        if not is_valid:
            raise BadRequest(f"{folder}/url is missing, or not a URL that begins with https:// or http://")
        headers = {}
        for line in filter(None, map(str.strip, known["headers"].splitlines())):
            name, colon, value = line.partition(":")
            if not (colon and name.replace("-", "").isalnum() and name.isascii() and value.strip().isprintable()):
                raise BadRequest(f"{folder}/headers has a line that is not `Name: value`")
            headers[name] = value.strip()
        if bool(known["access-key-id"]) != bool(known["secret-access-key"]):
            raise BadRequest(f"{folder} has one of access-key-id and secret-access-key, and both are needed")
        key = None
        if known["access-key-id"]:
            key = S3Key(
                known["access-key-id"],
                known["secret-access-key"],
                known["session-token"],
                known["region"] or "us-east-1",
            )
        ca_file = Path(folder) / "ca.crt"
        return cls(url, headers, str(ca_file) if ca_file.exists() else "", key)

    def put(self, path: Path) -> str:
        """Send a file. Return the URL without its query. Raises NotUploaded."""
        url = httpx.URL(self._url_of(path.name))
        place = str(url.copy_with(query=None, userinfo=b""))
        backoff = Backoff(1.0, 30.0)
        # The variables of proxies count: this is a host outside of the cluster.
        verify = client_tls(ca_file=self.ca_file).context if self.ca_file else True
        with httpx.Client(verify=verify, timeout=TIMEOUT_S, follow_redirects=False) as client:
            for attempt in range(1, ATTEMPTS_MAX + 1):
                reason, is_final = self._put_once(client, url, path)
                if not reason:
                    return place
                if is_final or attempt == ATTEMPTS_MAX:
                    break
                self.sleep(backoff.next_delay_s())
        raise NotUploaded(f"cannot send the backup to {place}: {reason}; the file is {path}", attempts=attempt)

    def _put_once(self, client: httpx.Client, url: httpx.URL, path: Path) -> tuple[str, bool]:
        """Return why the upload failed, empty if it did not, and whether it would fail again."""
        headers = {"Content-Type": "application/gzip", **self.headers}
        try:
            with path.open("rb") as file:
                if self.key is not None:
                    payload = hashlib.file_digest(file, "sha256").hexdigest()
                    headers |= signed_headers("PUT", str(url), payload_sha256=payload, key=self.key, now=self.now())
                    file.seek(0)
                answer = client.put(url, content=file, headers=headers)
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__, False
        except OSError as error:
            return f"cannot read the file: {error.strerror or error}", True
        if answer.is_success:
            return "", True
        text = " ".join(answer.text[:ANSWER_SIZE_MAX].split())
        return f"{answer.status_code} {answer.reason_phrase} {text}".strip(), answer.status_code not in AGAIN

    def _url_of(self, name: str) -> str:
        if "{name}" in self.url:
            return self.url.replace("{name}", name)
        return self.url + name if self.url.endswith("/") else self.url


def _content(path: Path) -> str:
    """Return the content of an optional file, empty if it is missing. Raises BadRequest."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_SIZE_MAX + 1)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror or error}") from error
    if len(data) > FILE_SIZE_MAX:
        raise BadRequest(f"{path} is larger than {FILE_SIZE_MAX} bytes")
    try:
        return data.decode().strip()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{path} is not text in UTF-8") from error
