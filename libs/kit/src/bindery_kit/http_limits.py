"""A bound on what a client may send before its request is one.

uvicorn keeps headers and trailers for as long as they come, so that one connection could fill the memory of a process
that holds other people's data. Here whatever arrives without finishing a head or carrying on a body counts, and over
the limit the answer is 431 and the connection is closed.

Requests that are sent before the ones in front of them were answered wait in uvicorn, which reads on after each answer.
Here nothing is read while some wait, and more than PIPELINED_MAX of them end the connection with a 400.
"""

from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bindery_kit.problem import CONTENT_TYPE, problem_response

HEAD_SIZE_MAX: Final = 256 * 1024
"""Bytes of request line and headers, or of trailers. One read of the socket more may be taken."""


PIPELINED_MAX: Final = 64
"""Requests of one connection that wait for answers to those in front of them."""


class HeadLimit(HttpToolsProtocol):
    """Mixed into the protocol that a server uses. Counts, and refuses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unfinished_size = 0
        self._moved_on = False

    def data_received(self, data: bytes) -> None:
        self._moved_on = False
        super().data_received(data)
        if self._moved_on:
            self._unfinished_size = 0
            return
        self._unfinished_size += len(data)
        if self._unfinished_size > HEAD_SIZE_MAX and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        self._moved_on = True
        if len(self.pipeline) >= PIPELINED_MAX:
            self.pipeline.clear()
            raise ValueError("too many requests are pipelined")  # the parser makes an invalid request of it: 400
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline and not self.transport.is_closing():
            self.flow.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._moved_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._moved_on = True
        super().on_message_complete()

    def _refuse(self) -> None:
        answer = problem_response(
            status=431, code="headers_too_large", detail="the request's headers are too large",
            facts={"size_max": HEAD_SIZE_MAX},
        )  # fmt: skip
        body = bytes(answer.body)
        head = (
            f"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: {CONTENT_TYPE}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.headers = []
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


def with_head_limit(protocol: type[HttpToolsProtocol]) -> type[HttpToolsProtocol]:
    """`protocol`, refusing what has no end."""
    return type(f"Limited{protocol.__name__}", (HeadLimit, protocol), {})
