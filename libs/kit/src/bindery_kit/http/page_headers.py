"""Headers of the HTML pages that a service serves to people.

| header                    | what the browser then does                                                       |
|---------------------------|----------------------------------------------------------------------------------|
| `Content-Security-Policy` | runs no script, loads nothing, sends no form, applies only the page's own style  |
|                           | sheet, and shows the page in no frame, so that no page can hide it under its own |
|                           | buttons (clickjacking)                                                           |
| `X-Frame-Options`         | shows the page in no frame, in browsers without `frame-ancestors`                |
| `Referrer-Policy`         | does not reveal the page's address to linked sites                               |

`X-Content-Type-Options: nosniff` is sent with every response of an application or of the origin check (`NOSNIFF`).
Sources: W3C Content Security Policy Level 3, Referrer Policy; RFC 7034; Fetch standard, "X-Content-Type-Options".
"""

import base64
import hashlib
from typing import Final

NOSNIFF: Final = ("X-Content-Type-Options", "nosniff")
"""Header of every response of an application: a browser does not guess that a response is a script or a page."""


def page_headers(style: str) -> dict[str, str]:
    """Return the headers of a page without scripts. `style`: the text between `<style>` and `</style>`, exactly."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    rules = (
        "default-src 'none'",
        f"style-src 'sha256-{digest}'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(rules),
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
    }
