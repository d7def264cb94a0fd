"""The reason for the end of a process, as one line on stderr and in the file that Kubernetes shows."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bindery_core.errors import NotThere
from bindery_core.version import VERSION
from bindery_kit.observability import last_words

SERVICE = """
import sys
from bindery_core.errors import Conflict
from bindery_kit.observability import logs
from bindery_kit.process import runtime

logs.configure(service="test")

async def main(shutdown):
    {body}

sys.exit(runtime.run_service(main, program="bindery-test"))
"""


def run(body: str, termination_log: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "BINDERY_TERMINATION_LOG": str(termination_log)}
    script = SERVICE.format(body=body)
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ('raise Conflict("two\\n  lines", bookie_id="b0")', 1, "two lines: bookie_id=b0"),
        ('open("/no/such/place")', 1, "cannot use /no/such/place: No such file or directory; is its volume mounted?"),
        ("1 / 0", 1, "unexpected ZeroDivisionError: division by zero; this is a defect of the program"),
        ('shutdown.request("the journal died", exit_code=1)', 1, "the journal died"),
        ('return shutdown.give_up(Conflict("no"), exit_code=2)', 2, "no"),
        ('shutdown.request("SIGTERM"); raise Conflict("while stopping")', 1, "while stopping"),
    ],
)
def test_the_reason_of_every_end_is_the_final_message(tmp_path: Path, body: str, code: int, said: str) -> None:
    message = tmp_path / "message"
    done = run(body, message)
    assert done.returncode == code
    *_, last = done.stderr.splitlines()
    assert last.startswith(f"bindery-test: {said}")
    assert message.read_text() == last


def test_a_requested_end_has_no_final_message(tmp_path: Path) -> None:
    done = run('shutdown.request("SIGTERM")', tmp_path / "message")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()  # the log of its start
    assert json.loads(line).items() >= {"event": "process_started", "version": VERSION}.items()
    assert not (tmp_path / "message").exists()


def test_a_termination_log_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    done = run('raise Conflict("no")', tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "bindery-test: no")


def test_a_blocked_thread_does_not_delay_the_end(tmp_path: Path) -> None:
    body = "import asyncio, time; asyncio.get_running_loop().run_in_executor(None, time.sleep, 600); return 3"
    assert run(body, tmp_path / "message").returncode == 3


@pytest.mark.parametrize("character", ["x", "é", "語", "🙂"])
def test_a_long_message_is_cut_between_characters(character: str) -> None:
    for length in range(last_words.SIZE_MAX - 8, last_words.SIZE_MAX + 8):
        data = last_words.cut(character * length)
        assert len(data) <= last_words.SIZE_MAX
        text = data.decode()
        assert text.rstrip(" .").strip(character) == ""
        assert text.endswith(" ...") is (len((character * length).encode()) > last_words.SIZE_MAX)


def test_each_common_fault_of_a_volume_has_its_fix() -> None:
    def sentence(number: int) -> str:
        return last_words.sentence_of(OSError(number, os.strerror(number), "/data/journal"))

    assert f"uid {os.geteuid()} (Kubernetes: securityContext.fsGroup" in sentence(errno.EACCES)
    assert "No space left on device; free space on that volume, or make it larger" in sentence(errno.ENOSPC)
    assert "Read-only file system; mount a writable volume" in sentence(errno.EROFS)
    assert sentence(errno.EXDEV).endswith("; the log has more")
    assert last_words.sentence_of(NotThere("no such thing", id=7)) == "no such thing: id=7"
