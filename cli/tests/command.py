"""Run the `bindery` command as a process, without the half second that its imports take.

A server that has imported the command forks for each call. A call takes milliseconds, and is a process with its own
standard streams, signals and exit code. Tests that start a cluster cover `python -m bindery`.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

PRELOADED: Final = (
    "bindery.main",
    "bindery.common.operator",
    "bindery.standalone.supervisor",
    "httpx",
    "bindery_client.client",
    "bindery_metadata.stores.zookeeper",
)
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(list(PRELOADED))


def bindery(*arguments: str, stdin: str | None = None, timeout_s: float = 90) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end. Without `stdin` its input is empty. Raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(stdin or "")
        process = _forks.Process(target=_run, args=(arguments, streams, dict(os.environ), Path.cwd()))
        process.start()
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["bindery", *arguments], timeout_s)
        assert process.exitcode is not None
        return subprocess.CompletedProcess(arguments, process.exitcode, streams[1].read_text(), streams[2].read_text())


def _run(arguments: tuple[str, ...], streams: list[Path], environment: dict[str, str], directory: Path) -> None:
    """Run the command in the forked process."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    for number, path in enumerate(streams):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.argv = ["bindery", *arguments]
    from bindery.main import main

    main()
