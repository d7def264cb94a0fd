"""A worker without a thread and without an event loop. Tests can import this module."""

from collections.abc import Callable
from typing import Any

from bindery_bookie.storage.io.worker import Done


class DirectWorker:
    """A Worker that runs each job within `submit`."""

    def __init__(self) -> None:
        self.jobs = 0

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        self.jobs += 1
        try:
            result, error = job(), None
        except Exception as raised:
            result, error = None, raised
        done(result, error)

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        callback(*args)

    def close(self) -> None:
        return None
