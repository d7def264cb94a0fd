"""End the process on SIGTERM while it still imports modules. Every main module imports this first.

The kernel does not deliver a signal without a handler to the first process of a container (pid 1). Without this
handler, a SIGTERM in the first second of a start is lost, and the pod is killed only after its whole grace period.
Outside of containers, the default action ends the process. `runtime.run` replaces this handler.
"""

import os
import signal

PID_OF_A_CONTAINER = 1


def _end(number: int, _frame: object) -> None:
    os._exit(128 + number)  # nothing is open yet


if os.getpid() == PID_OF_A_CONTAINER:
    signal.signal(signal.SIGTERM, _end)
