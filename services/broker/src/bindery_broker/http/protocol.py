"""The server's HTTP/1.1 protocol, with our form of its one own answer: what cannot be parsed is a problem too.

It is what a URL over 64 KiB, a method that HTTP does not know or random bytes get; the connection is closed then.
"""

from bindery_kit.problem import CONTENT_TYPE, problem_response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class ProblemHttpProtocol(HttpToolsProtocol):
    def send_400_response(self, msg: str) -> None:
        """Answer that the request cannot be parsed, and hang up."""
        answer = problem_response(
            status=400, code="invalid_http", detail="this is not an HTTP/1.1 request we can parse"
        )
        body = bytes(answer.body)
        head = (
            f"HTTP/1.1 400 Bad Request\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()
