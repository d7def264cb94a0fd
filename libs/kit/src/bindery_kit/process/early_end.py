"""End the process on SIGTERM while it still imports modules. Every main module imports this first.

Linux ignores SIGTERM for pid 1 of a container unless the process has installed a handler. Without this handler, a
SIGTERM in the first second of a start is ignored, and Kubernetes kills the pod only when its grace period ends. Outside
of containers, the default action ends the process. `runtime.run` replaces this handler.
"""

import os
import signal

PID_OF_A_CONTAINER = 1


def _end(number: int, _frame: object) -> None:
    os._exit(128 + number)  # nothing is open yet


if os.getpid() == PID_OF_A_CONTAINER:
    signal.signal(signal.SIGTERM, _end)
