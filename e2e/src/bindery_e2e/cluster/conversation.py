"""A program in a pod that answers questions, one JSON object per line, until the conversation is closed."""

import json
import queue
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from bindery_e2e.cluster.cluster import Cluster, ClusterError

ANSWER_TIMEOUT_S: Final = 120.0


class Conversation:
    """`with Conversation(cluster, pod, program, container="toolbox") as talk:`. The program is a Python file."""

    def __init__(self, cluster: Cluster, pod: str, program: Path, *, container: str) -> None:
        self._command = ["kubectl", "-n", cluster.namespace, "exec", "-i", pod, "-c", container, "--", "python", "-c"]
        self._command.append(program.read_text())
        self._answers: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Raises ClusterError if the program has ended or does not answer in ANSWER_TIMEOUT_S."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=ANSWER_TIMEOUT_S)
        except (OSError, queue.Empty) as error:
            raise ClusterError(f"the program in the pod does not answer: {error!r}") from error
        if not line:
            raise ClusterError("the program in the pod has ended; its errors are above")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def _read(self, lines: IO[str]) -> None:
        """Put each line in the queue, and an empty one at the end."""
        for line in lines:
            self._answers.put(line)
        self._answers.put("")
