"""Check the type and the encoding of a request's body from its headers, before the body is read.

| header            | accepted                                                                                |
|-------------------|-----------------------------------------------------------------------------------------|
| Content-Type      | of a body that is read as JSON: exactly one `application/json`, with any parameters     |
| Content-Encoding  | none, or `identity`                                                                     |
| Transfer-Encoding | none, or `chunked`                                                                      |

A web page can make a browser send a body of another type, or without a type, to any address without asking the server
there. It cannot do so with `application/json`; thus the type also keeps foreign pages out. A body with an encoding that
nobody decodes would be stored as it is.
Source: Fetch, "CORS-safelisted request-header"; RFC 9110, section 8.4.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from bindery_core.errors import UnsupportedMediaType

Headers = Sequence[tuple[bytes, bytes]]
"""Headers of a request, with names in lower case."""

JSON_TYPE: Final = b"application/json"
_SHOWN_SIZE_MAX: Final = 100
"""Maximum characters of a header's value in an error."""


def check_json_type(headers: Headers) -> None:
    """Raise UnsupportedMediaType unless exactly one Content-Type is present, and it is JSON_TYPE."""
    found = [value for name, value in headers if name == b"content-type"]
    if len(found) != 1 or found[0].partition(b";")[0].strip().lower() != JSON_TYPE:
        raise UnsupportedMediaType(
            "this request takes a JSON body: send it with -H 'Content-Type: application/json'",
            content_type=_shown(found),
        )


def check_codings(headers: Headers) -> None:
    """Raise UnsupportedMediaType if the body has an encoding that is not decoded here."""
    for name, value in headers:
        if name == b"content-encoding":
            check_content_coding(value)
        elif name == b"transfer-encoding":
            check_transfer_coding(value)


def check_content_coding(value: bytes) -> None:
    """Check one Content-Encoding header."""
    if any(coding.strip().lower() not in (b"", b"identity") for coding in value.split(b",")):
        raise UnsupportedMediaType(
            "encoded bodies are not decoded here: send the body without Content-Encoding",
            content_encoding=_shown([value]),
        )


def check_transfer_coding(value: bytes) -> None:
    """Check one Transfer-Encoding header."""
    if value.strip().lower() != b"chunked":
        raise UnsupportedMediaType(
            "of the transfer encodings only chunked is decoded here", transfer_encoding=_shown([value])
        )


def _shown(values: Iterable[bytes]) -> str:
    return b", ".join(values).decode("latin-1")[:_SHOWN_SIZE_MAX] or "none"
