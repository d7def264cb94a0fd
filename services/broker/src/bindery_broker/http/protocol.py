"""uvicorn's HTTP/1.1 protocol, which answers a request that it cannot parse with a problem document.

Examples are a URL over 64 KiB, a method that HTTP does not define, and random bytes. The connection is closed after the
answer.
"""

from bindery_kit.http.http_limits import hang_up
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class ProblemHttpProtocol(HttpToolsProtocol):
    def send_400_response(self, msg: str) -> None:
        """Answer that the request cannot be parsed, and close the connection."""
        hang_up(self.transport, 400, "invalid_http", "the request cannot be parsed as HTTP/1.1")
