"""Last words: why a process ended, in one sentence, where an operator looks first.

    <program>: <what happened>: <cause>; <fix>

It is the last line on stderr, below the log's own, and the content of the file that BINDERY_TERMINATION_LOG names, if
it names one: Kubernetes shows `/dev/termination-log` as the message of a container that ended. At most SIZE_MAX bytes,
UTF-8. A file that cannot be written is no reason to fail anew.
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
"""Environment name; its value is a path."""
SIZE_MAX: Final = 2048
"""Bytes; Kubernetes keeps 4096, and 12 KiB of all containers of a pod together."""
_BIND_FIXES: Final = {
    errno.EADDRINUSE: "another process has that port: end it, or name another port",
    errno.EADDRNOTAVAIL: "this machine has no such address: name one that it has, or 0.0.0.0",
    errno.EACCES: "ports below 1024 need a privilege: name a higher one",
}
_ELLIPSIS: Final = " ..."

_OWNER: Final = "give the directory to uid {uid} (Kubernetes: securityContext.fsGroup of the pod)"
_FIXES: Final = {
    errno.EACCES: f"make it readable and writable: {_OWNER}",
    errno.EPERM: f"make it readable and writable: {_OWNER}",
    errno.EROFS: "mount a volume that is writable there, or name the directory of one",
    errno.ENOSPC: "free space on that volume, or make it larger (Kubernetes: the size of its claim)",
    errno.EDQUOT: "raise the quota of that volume, or free space on it",
    errno.ENOENT: "is its volume mounted? Mount it, or name another directory",
    errno.ENOTDIR: "name a directory",
    errno.EAGAIN: "another process uses it: end that one, or name another directory",
    errno.EIO: "the disk fails: replace the volume; what it held is fetched from the other copies",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "raise the container's memory limit",
}
"""What ends an error of the system."""


def say(program: str, sentence: str) -> None:
    """Write the sentence where the module says."""
    text = f"{program}: {one_line(sentence)}"
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    if path := os.environ.get(TERMINATION_LOG):
        with contextlib.suppress(OSError, ValueError):
            Path(path).write_bytes(cut(text))


def one_line(text: str) -> str:
    """Lines and runs of blanks become one line."""
    return " ".join(text.split())


def cut(text: str) -> bytes:
    """As UTF-8, whole characters of it, at most SIZE_MAX bytes."""
    data = text.encode("utf-8", "replace")
    if len(data) <= SIZE_MAX:
        return data
    kept = data[: SIZE_MAX - len(_ELLIPSIS)].decode("utf-8", "ignore")
    return (kept + _ELLIPSIS).encode()


def bind_fix(error: OSError) -> str:
    """What ends an error of binding a port."""
    if isinstance(error, socket.gaierror):
        return "name an address of this machine, or 0.0.0.0"
    return _BIND_FIXES.get(error.errno or 0, "name another address or port")


def sentence_of_end(part: str, error: BaseException | None) -> str:
    """For a part of a process that must not end, and did; `error`: None when it just returned."""
    return f"{part} ended: {sentence_of(error) if error else 'without a request to stop; see the log'}"


def sentence_of(error: BaseException) -> str:
    """What happened, why, and what ends it, as far as the error itself tells. One of ours whose message is a table has
    an attribute `sentence`."""
    if isinstance(error, BinderyError):
        return getattr(error, "sentence", "") or str(error)
    if isinstance(error, OSError):
        place = f"cannot use {error.filename}" if error.filename else "the system refused"
        fix = _FIXES.get(error.errno or 0, "the log has more")
        return f"{place}: {error.strerror or error}; {fix.format(uid=os.geteuid())}"
    return f"unexpected {type(error).__name__}: {error}; this is a fault of the program: report the trace in the log"
