"""Start Apache BookKeeper's processes: a bookie, auto-recovery, and the driver with its client and shell."""

import asyncio
import itertools
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bindery_metadata.stores.embedded import die_with_parent, find_java

from e2e.interop.jars import HERE, class_path
from e2e.interop.processes import HOST, Process

ANSWER_TIMEOUT_S: Final = 90.0
SORTED_STORAGE: Final = "org.apache.bookkeeper.bookie.SortedLedgerStorage"
DB_STORAGE: Final = "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage"
_OPENED: Final = ("java.io", "java.nio", "java.util.zip", "java.lang", "jdk.internal.misc")
"""Packages that BookKeeper's scripts open on Java 17."""


def java_command(*words: str, heap_mb: int = 256, log_level: str = "warn") -> list[str]:
    """Command of a JVM that is tuned for a short start time."""
    return [
        str(find_java()),
        f"-Xmx{heap_mb}m",
        "-XX:MaxDirectMemorySize=256m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-XX:-UsePerfData",
        "-Xshare:auto",
        *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED),
        "-Dio.netty.tryReflectionSetAccessible=true",
        "-Djava.net.preferIPv4Stack=true",
        f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}",
        f"-Dinterop.log={log_level}",
        "-cp",
        class_path(),
        *words,
    ]


def metadata_uri(zookeeper: str, root: str) -> str:
    return f"zk+hierarchical://{zookeeper}{root}"


def apache_bookie(
    name: str, *, directory: Path, zookeeper: str, root: str, port: int, storage: str, settings: Mapping[str, str]
) -> Process:
    """Create `bookkeeper bookie` with the configuration `bookie.conf`, without starting it."""
    directory.mkdir(parents=True, exist_ok=True)
    conf = directory / "bookie.conf"
    write_conf(
        conf,
        {
            "metadataServiceUri": metadata_uri(zookeeper, root),
            "bookiePort": str(port),
            "advertisedAddress": HOST,
            "listeningInterface": "lo",
            "allowLoopback": "true",
            "journalDirectory": str(directory / "journal"),
            "ledgerDirectories": str(directory / "ledgers"),
            "ledgerStorageClass": storage,
            "dbStorage_writeCacheMaxSizeMb": "32",
            "dbStorage_readAheadCacheMaxSizeMb": "32",
            "journalPreAllocSizeMB": "4",
            "entryLogFilePreallocationEnabled": "false",
            "httpServerEnabled": "false",
            **settings,
        },
    )
    command = java_command("org.apache.bookkeeper.server.Main", "--conf", str(conf))
    return Process(name, command, log=directory / "log", port=port)


def apache_autorecovery(name: str, *, directory: Path, zookeeper: str, root: str, port: int) -> Process:
    """Create `bookkeeper autorecovery` (an auditor and a worker without a port), without starting it."""
    directory.mkdir(parents=True, exist_ok=True)
    conf = directory / "autorecovery.conf"
    write_conf(
        conf,
        {
            "metadataServiceUri": metadata_uri(zookeeper, root),
            "zkTimeout": "4000",
            "bookiePort": str(port),
            "advertisedAddress": HOST,
            "allowLoopback": "true",
            "httpServerEnabled": "false",
            "openLedgerRereplicationGracePeriod": "2000",
        },
    )
    command = java_command("org.apache.bookkeeper.replication.AutoRecoveryMain", "--conf", str(conf))
    return Process(name, command, log=directory / "log", port=port)


def write_conf(path: Path, settings: Mapping[str, str]) -> None:
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))


def zookeeper_tls(*, authority: Path, key_store: Path) -> tuple[str, ...]:
    """Options of a JVM whose ZooKeeper clients use TLS. Files are PEM files with the suffix .pem.

    `key_store`: key and certificate to present, in one file.
    """
    return (
        "-Dzookeeper.client.secure=true",
        "-Dzookeeper.clientCnxnSocket=org.apache.zookeeper.ClientCnxnSocketNetty",
        f"-Dzookeeper.ssl.trustStore.location={authority}",
        f"-Dzookeeper.ssl.keyStore.location={key_store}",
    )


async def apache_shell(conf: Path, *words: str, options: Sequence[str] = ()) -> tuple[int, str]:
    """Run `bookkeeper shell` in a JVM of its own and return (exit status, output). `options`: of the JVM."""
    child = await asyncio.create_subprocess_exec(
        *java_command(*options, "org.apache.bookkeeper.bookie.BookieShell", "-conf", str(conf), *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=die_with_parent,
    )
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            said, _ = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        raise
    assert child.returncode is not None
    return child.returncode, said.decode()


class Refused(Exception):
    """A client refused an operation. `name`: the client's name of the error."""

    def __init__(self, name: str, text: str = "") -> None:
        super().__init__(f"{name} {text}".strip())
        self.name = name


class DriverBug(Exception):
    """The driver failed unexpectedly, or read a wrong payload."""


class Driver:
    """Driver.java in a JVM. `call` may be used concurrently: responses are matched to requests by id."""

    def __init__(self, *, log: Path, options: Sequence[str] = ()) -> None:
        """`options`: of the JVM."""
        self._log = log
        self._options = options
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._child: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._child = await asyncio.create_subprocess_exec(
                *java_command(*self._options, "Driver", heap_mb=768),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
                limit=16 * 1024 * 1024,
            )
        self._reading = asyncio.create_task(self._read())

    async def call(self, op: str, **facts: Any) -> dict[str, Any]:
        """Call an operation. Raises Refused for errors of the client, DriverBug for all others."""
        assert self._child is not None
        assert self._child.stdin is not None
        number = next(self._ids)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._child.stdin.write(json.dumps({"id": number, "op": op, **facts}).encode() + b"\n")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer: dict[str, Any] = await answered
        finally:
            del self._waiting[number]
        if "bug" in answer:
            raise DriverBug(f"{op}: {answer['bug']} (see {self._log})")
        if "code" in answer:
            code = f" ({answer['code']})" if answer["code"] else ""
            raise Refused(answer["error"] + code)
        return answer

    async def shell(self, conf: Path, *words: str, properties: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Run `bookkeeper shell` with these arguments and return (exit status, output).

        `properties`: system properties of the JVM during the command.
        """
        answer = await self.call("shell", conf=str(conf), words=list(words), properties=dict(properties or {}))
        return int(answer["status"]), str(answer["said"])

    async def _read(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        async for line in self._child.stdout:
            answer = json.loads(line)
            if waiter := self._waiting.get(answer.pop("id")):
                waiter.set_result(answer)
        for waiter in self._waiting.values():
            waiter.set_exception(DriverBug(f"the driver ended, see {self._log}"))

    async def stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            await self._child.wait()
        if self._reading is not None:
            await self._reading
