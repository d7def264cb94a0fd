"""Run the clusters that `peer.py` compares. All share one ZooKeeper, and each has its own ledgers root."""

import contextlib
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any, Final

from bindery_metadata.stores import embedded

HOST: Final = "127.0.0.1"
REPOSITORY: Final = Path(__file__).resolve().parent.parent
START_TIMEOUT_S: Final = 90.0
STOP_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.002
SESSION_TIMEOUT_S: Final = 10


@dataclass(frozen=True)
class System:
    """One system of the comparison. `settings`: settings of Apache's bookies, as in bk_server.conf."""

    name: str
    title: str
    is_ours: bool = False
    settings: tuple[str, ...] = ()
    memory: str = "default"


OURS: Final = System("bindery", "Bindery", is_ours=True)
SYSTEMS: Final = {
    system.name: system
    for system in (
        OURS,
        System("apache", "Apache"),
        System("apache-eager", "Apache, eager", settings=("journalFlushWhenQueueEmpty=true",)),
        System("apache-small", "Apache, small", memory="small"),
    )
}


def free_port() -> int:
    """A free port below the range of ephemeral ports."""
    rng = random.SystemRandom()
    while True:
        port = rng.randrange(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


@dataclass
class Process:
    name: str
    command: Sequence[str]
    port: int
    log: Path
    child: "subprocess.Popen[bytes] | None" = None

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    def start(self) -> float:
        """Start the process. Returns the seconds from exec until its port accepts connections."""
        began = time.perf_counter()
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [str(word) for word in self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=embedded.die_with_parent,
            )
        while not _accepts(self.port):
            if self.child.poll() is not None or time.perf_counter() - began > START_TIMEOUT_S:
                raise SystemExit(
                    f"{self.name} does not accept connections; end of its log:\n{self.log.read_text()[-3000:]}"
                )
            time.sleep(POLL_S)
        return time.perf_counter() - began

    def stop(self) -> None:
        if self.child is None:
            return
        self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait(STOP_TIMEOUT_S)
        self.child = None


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Peers:
    """The programs outside this repository that run Apache's side: `bookkeeper/run` below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "bookkeeper" / "run"
        if not self.program.is_file():
            raise SystemExit(f"{self.program} does not exist. Pass the folder of the peers' programs with --peers")
        self._parts: dict[str, Any] = runpy.run_path(str(self.program), run_name="peers")
        if not any(self._parts["LIB"].glob("bookkeeper-server-*.jar")):
            print("fetching Apache BookKeeper (once)", file=sys.stderr, flush=True)
            subprocess.run([str(self.program), "fetch"], check=True)
        for folder in (self._parts["DATA"], self._parts["CLASSES"]):
            folder.mkdir(parents=True, exist_ok=True)

    def bookie_command(self, conf: Path, *, memory: str) -> list[str]:
        words: list[str] = self._parts["java"](
            "org.apache.bookkeeper.server.Main", "--conf", conf, memory=self._parts["MEMORY"][memory]
        )
        return words

    def shell(self, *words: str, zookeeper: str, root: str) -> None:
        done = subprocess.run(
            [str(self.program), "shell", "--zk", zookeeper, "--ledgers-root", root, "--", *words],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"bookkeeper shell {' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    def load_command(self, cluster: "Cluster", *words: str) -> list[str]:
        """Command of the load program, Apache's client, for `cluster`."""
        return [
            str(self.program), "bench", "--zk", cluster.zookeeper, "--ledgers-root", cluster.root,
            "--pids", ",".join(str(bookie.pid) for bookie in cluster.bookies), "--", *words,
        ]  # fmt: skip

    @property
    def storage(self) -> str:
        """The storage class of Apache's bookies."""
        return str(self._parts["STORAGE"]["db"])


@dataclass
class Cluster:
    """The bookies of one system."""

    system: System
    zookeeper: str
    folder: Path
    peers: Peers
    our_options: Sequence[str] = ()
    bookies: list[Process] = field(default_factory=list)

    @property
    def root(self) -> str:
        return "/ledgers" if self.system.is_ours else f"/{self.system.name}"

    def initialize(self) -> None:
        if self.system.is_ours:
            # Python may be configured not to write bytecode (see the Makefile), so it is compiled before.
            subprocess.run([sys.executable, "-m", "compileall", "-q", *glob(f"{REPOSITORY}/*/*/src")], check=True)
            words = ("bindery", "cluster", "init", "--zookeeper", self.zookeeper)
            subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True)
        else:
            self.peers.shell("initnewcluster", zookeeper=self.zookeeper, root=self.root)

    def new_bookie(self) -> Process:
        """Create a bookie without starting it."""
        port = free_port()
        name = f"{self.system.name}-{len(self.bookies)}-{port}"
        folder = self.folder / name
        folder.mkdir(parents=True)
        command = self._our_command(folder, port) if self.system.is_ours else self._apache_command(folder, port)
        return Process(name, command, port, folder / "log")

    def _our_command(self, folder: Path, port: int) -> list[str]:
        return [
            sys.executable, "-m", "bindery_bookie", "--port", str(port), "--http-port", "0",
            "--zookeeper", self.zookeeper, "--ledgers-root", self.root,
            "--zookeeper-session-timeout-s", str(SESSION_TIMEOUT_S), "--log-level", "warning",
            "--journal-dir", str(folder / "journal"), "--ledger-dir", str(folder / "ledgers"), *self.our_options,
        ]  # fmt: skip

    def _apache_command(self, folder: Path, port: int) -> list[str]:
        settings = {
            "metadataServiceUri": f"zk+hierarchical://{self.zookeeper}{self.root}", "bookiePort": port,
            "advertisedAddress": HOST, "listeningInterface": "lo", "allowLoopback": "true",
            "journalDirectory": folder / "journal", "ledgerDirectories": folder / "ledgers",
            "journalSyncData": "true", "ledgerStorageClass": self.peers.storage, "httpServerEnabled": "false",
            "zkTimeout": 1000 * SESSION_TIMEOUT_S, **dict(word.split("=", 1) for word in self.system.settings),
        }  # fmt: skip
        conf = folder / "bookie.conf"
        conf.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        return self.peers.bookie_command(conf, memory=self.system.memory)

    def start(self, bookies: int) -> list[float]:
        """Start bookies one after the other. Returns the seconds until each opened its port."""
        took = []
        for _ in range(bookies):
            bookie = self.new_bookie()
            took.append(bookie.start())
            self.bookies.append(bookie)
        return took

    def stop(self) -> None:
        for bookie in self.bookies:
            bookie.stop()
        self.bookies.clear()

    def rss_mib(self) -> float:
        """Memory of the largest bookie."""
        return max(rss_mib(bookie.pid) for bookie in self.bookies)


def zookeeper(folder: Path) -> Process:
    """Create the ZooKeeper of all clusters without starting it."""
    spec = embedded.ServerSpec(folder / "zookeeper", free_port())
    spec.data_dir.mkdir(parents=True)
    command = embedded.command(
        java=embedded.find_java(), jars=embedded.find_jars(), config=embedded.write_config(spec), heap_mb=256
    )
    return Process("zookeeper", command, spec.client_port, folder / "zookeeper.log")
