"""A process that is told to stop while it still imports, ends. Every main module imports this before anything else.

The kernel gives the first process of a container (pid 1) no signal that it has no handler for. Without this a SIGTERM
in the first second of a start is lost, and the pod is killed only when its whole grace period is over. Everywhere else
the signal ends the process without help. `runtime.run` puts its own handler in place of this one.
"""

import os
import signal

PID_OF_A_CONTAINER = 1


def _end(number: int, _frame: object) -> None:
    os._exit(128 + number)  # nothing is open yet


if os.getpid() == PID_OF_A_CONTAINER:
    signal.signal(signal.SIGTERM, _end)
