"""Report why a process ended, in one sentence, where operators look first.

    <program>: <what happened>: <cause>; <fix>

The sentence is the last line on stderr, and the content of the file that BINDERY_TERMINATION_LOG names, if it is set:
Kubernetes shows `/dev/termination-log` as the message of a terminated container. It has at most SIZE_MAX bytes of
UTF-8. An error while writing the file is ignored.
"""

import contextlib
import errno
import os
import socket
import sys
from pathlib import Path
from typing import Final

from bindery_core.errors import BinderyError

TERMINATION_LOG: Final = "BINDERY_TERMINATION_LOG"
"""Name of the environment variable that contains the path of the file."""
SIZE_MAX: Final = 2048
"""Maximum size of the sentence in bytes. Kubernetes keeps 4096, and 12 KiB for all containers of a pod together."""
_BIND_FIXES: Final = {
    errno.EADDRINUSE: "another process uses that port: stop it, or pass another port",
    errno.EADDRNOTAVAIL: "this machine has no such address: pass one that it has, or 0.0.0.0",
    errno.EACCES: "ports below 1024 need a privilege: pass a higher port",
}
_ELLIPSIS: Final = " ..."

_OWNER: Final = "give the directory to uid {uid} (Kubernetes: securityContext.fsGroup of the pod)"
_FIXES: Final = {
    errno.EACCES: f"make it readable and writable: {_OWNER}",
    errno.EPERM: f"make it readable and writable: {_OWNER}",
    errno.EROFS: "mount a writable volume there, or set another directory",
    errno.ENOSPC: "free space on that volume, or make it larger (Kubernetes: the size of its claim)",
    errno.EDQUOT: "raise the quota of that volume, or free space on it",
    errno.ENOENT: "is its volume mounted? Mount it, or set another directory",
    errno.ENOTDIR: "set a path that is a directory",
    errno.EAGAIN: "another process uses it: stop that process, or set another directory",
    errno.EIO: "the disk fails: replace the volume; its entries are then copied from other bookies",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "raise the container's memory limit",
}
"""Error number of the operating system -> fix."""


def say(program: str, sentence: str) -> None:
    """Write the sentence to stderr and to the termination log."""
    text = f"{program}: {one_line(sentence)}"
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    if path := os.environ.get(TERMINATION_LOG):
        with contextlib.suppress(OSError, ValueError):
            Path(path).write_bytes(cut(text))


def one_line(text: str) -> str:
    """Return the text on one line, with single blanks."""
    return " ".join(text.split())


def cut(text: str) -> bytes:
    """Return the text as UTF-8, cut after a whole character to at most SIZE_MAX bytes."""
    data = text.encode("utf-8", "replace")
    if len(data) <= SIZE_MAX:
        return data
    kept = data[: SIZE_MAX - len(_ELLIPSIS)].decode("utf-8", "ignore")
    return (kept + _ELLIPSIS).encode()


def bind_fix(error: OSError) -> str:
    """Return the fix for an error while binding a port."""
    if isinstance(error, socket.gaierror):
        return "pass an address of this machine, or 0.0.0.0"
    return _BIND_FIXES.get(error.errno or 0, "pass another address or port")


def sentence_of_end(part: str, error: BaseException | None) -> str:
    """Return the sentence for a part that ended although it must not. `error`: None if it returned without an error."""
    return f"{part} ended: {sentence_of(error) if error else 'without a request to stop; see the log'}"


def sentence_of(error: BaseException) -> str:
    """Return the cause and the fix of an error, as far as they are known.

    A BinderyError whose message is a table has an attribute `sentence`, which is used instead.
    """
    if isinstance(error, BinderyError):
        return getattr(error, "sentence", "") or str(error)
    if isinstance(error, OSError):
        place = f"cannot use {error.filename}" if error.filename else "the system refused"
        fix = _FIXES.get(error.errno or 0, "the log has more")
        return f"{place}: {error.strerror or error}; {fix.format(uid=os.geteuid())}"
    return (
        f"unexpected {type(error).__name__}: {error}; this is a defect of the program: report the traceback in the log"
    )
