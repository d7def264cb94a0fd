"""The command `bindery audit`, also for spark-submit: `spark-submit .../bindery_spark/main.py audit run ...`.

| exit code | meaning                                                            |
|----------:|--------------------------------------------------------------------|
| 0         | healthy; `diff`: no differences; other commands: success           |
| 1         | under-replicated, but every entry is readable; `diff`: differences |
| 2         | corrupt or unreadable data                                         |
| 3         | incomplete: not every copy was checked                             |
| 4         | the command itself failed, or was called with wrong arguments      |
| 130       | interrupted; an audit or a count can be resumed                    |

Results go to stdout (JSON with --json), everything else to stderr.
"""

import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from bindery_core.errors import BadRequest, BinderyError
from typer.exceptions import TyperException

from bindery_spark.arguments import EXIT_INTERRUPTED, bytes_of, duration_ms, ledger_range, level_of
from bindery_spark.audit.findings.findings import Exit
from bindery_spark.security_options import (
    AuthPlugin,
    CaFile,
    CertificateFile,
    CheckHostname,
    KeyFile,
    TokenFile,
)
from bindery_spark.topics.commands import count, export

if TYPE_CHECKING:
    from bindery_spark.audit.checkpoint import RunDirectory
    from bindery_spark.audit.options import Options
    from bindery_spark.audit.outcome import Outcome

OUT_DEFAULT: Final = "audit-runs"
"""Default directory of all runs."""
RATE_DEFAULT: Final = "64MiB/s"
"""Default maximum read rate per bookie, more than two cores can read. If a bookie answers slowly, readers pause
(`throttle.Pressure`)."""
LISTED_MAX: Final = 20
"""Maximum number of proposed marks that are printed."""

app = typer.Typer(
    name="audit",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Read every replica of every entry with Spark, and report missing, damaged and orphaned data.",
    epilog="Exit codes: 0 healthy, 1 under-replicated, 2 corrupt or unreadable, 3 incomplete, 4 the command failed, "
    "130 interrupted. `diff`: 0 no differences, 1 differences.",
)
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory of all runs.", envvar="BINDERY_AUDIT_OUT")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def now_ms() -> int:
    """Wall-clock time in ms since 1970."""
    return time.time_ns() // 1_000_000


@app.command()
def run(
    zookeeper: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", envvar="BINDERY_ZOOKEEPER", help="ZooKeeper servers, comma-separated, then the chroot."
        ),
    ] = "127.0.0.1:2181",
    level: Annotated[str, typer.Option(metavar="quick|standard|deep", help="How much to read and check.")] = "deep",
    out: Out = Path(OUT_DEFAULT),
    ledgers: Annotated[str, typer.Option(metavar="A-B", help="Audit only these ledgers: 7, 7-20 or 7-.")] = "",
    bookie: Annotated[
        str, typer.Option(metavar="ID", help="Audit only ledgers whose metadata names this bookie.")
    ] = "",
    since_verified: Annotated[
        str, typer.Option(metavar="DURATION", help="Skip ledgers that were verified within this time, for example 7d.")
    ] = "",
    rate: Annotated[
        str, typer.Option(metavar="BYTES/s", help="Maximum read rate per bookie; 0: unlimited.")
    ] = RATE_DEFAULT,
    cores: Annotated[int, typer.Option(min=1, max=1024, help="Number of Spark cores in local mode.")] = 2,
    open_max: Annotated[
        str, typer.Option(metavar="DURATION", help="Report ledgers that are open for longer than this.")
    ] = "7d",
    orphan_after: Annotated[
        str, typer.Option(metavar="DURATION", help="Report ledgers that no topic or cursor names, from this age on.")
    ] = "1h",
    orphans: Annotated[
        bool, typer.Option(help="Check bookies for orphaned data (deep audits), through their admin HTTP port.")
    ] = True,
    record: Annotated[
        bool, typer.Option(help="Record verified ledgers and the verdict in ZooKeeper, for later runs and alerts.")
    ] = True,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Per-bookie read timeout.")] = "10s",
    checkpoint_every: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Amount of data between checkpoints; default: 1GiB to 4GiB."),
    ] = "",
    resume: Annotated[
        str, typer.Option(metavar="RUN", help="Resume this run with its own options, or show it if it is finished.")
    ] = "",
    run_id: Annotated[
        str, typer.Option(metavar="ID", hidden=True, help="Id of the new run; default: time and a random suffix.")
    ] = "",
    apply: Annotated[bool, typer.Option("--apply", help="Mark repairable ledgers as under-replicated.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation of --apply.")] = False,
    ledgers_root: Annotated[str, typer.Option(metavar="PATH", help="Root znode of the cluster.")] = "/ledgers",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
    certificate_file: CertificateFile = "",
    key_file: KeyFile = "",
    auth_plugin: AuthPlugin = "",
    check_hostname: CheckHostname = True,
    http_ca_file: Annotated[
        str, typer.Option(metavar="FILE", help="CA of the bookies' https ports (BINDERY_HTTP_CA_FILE).")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Audit a cluster. Changes no ledger; with --apply it marks repairable ledgers as under-replicated."""
    from bindery_client.connection.security import SecurityFiles

    from bindery_spark.audit.checkpoint import RunDirectory, run_directory
    from bindery_spark.audit.options import Options
    from bindery_spark.audit.outcome import read_outcome
    from bindery_spark.run_lock import held
    from bindery_spark.sources.options import parse_size

    if resume:
        directory = run_directory(out, resume)
        options = Options.from_json(directory.read_options())
        out = directory.path.parent
    else:
        first, last = ledger_range(ledgers or "0-")
        parse_size(rate, name="--rate")
        if not duration_ms(timeout):
            raise BadRequest("option --timeout must be above 0", given=timeout)
        shown = {
            "token_file": token_file,
            "ca_file": ca_file,
            "certificate_file": certificate_file,
            "key_file": key_file,
            "auth_plugin": auth_plugin,
            "check_hostname": "" if check_hostname else "false",
            "http_ca_file": http_ca_file,
        }
        options = Options(
            zookeeper=zookeeper,
            ledgers_root=ledgers_root,
            level=level_of(level),
            first=first,
            last=last,
            bookie=bookie or None,
            since_verified_ms=duration_ms(since_verified) if since_verified else None,
            open_max_ms=duration_ms(open_max),
            orphan_after_ms=duration_ms(orphan_after),
            rate=rate,
            timeout_s=duration_ms(timeout) / 1000,
            group_bytes=bytes_of(checkpoint_every),
            security=SecurityFiles.of(shown, os.environ),
            orphans=orphans,
            record=record,
        )
        name = run_id or time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + f"-{secrets.token_hex(3)}"
        directory = RunDirectory((out / name).resolve())
    with held(directory.path, pid=os.getpid(), warn=_warn):
        if resume and directory.is_finished:
            outcome = read_outcome(directory)
        else:
            outcome = _audit(directory, options, cores=cores, is_new=not resume, is_quiet=as_json)
        _print_outcome(outcome, as_json=as_json)
        _apply(outcome, options, wanted=apply, yes=yes, as_json=as_json)
    raise typer.Exit(outcome.summary.exit_code)


def _audit(directory: "RunDirectory", options: "Options", *, cores: int, is_new: bool, is_quiet: bool) -> "Outcome":
    from bindery_metadata.stores.zookeeper_access import AccessFiles

    from bindery_spark.audit.run import run_audit
    from bindery_spark.audit.source import ClusterSource
    from bindery_spark.progress import QuietProgress, TerminalProgress
    from bindery_spark.session import AUDIT_CONF, session, share
    from bindery_spark.sources import cluster

    access = AccessFiles.of(os.environ)
    cluster.check_access(options.zookeeper, options.ledgers_root, options.security, access)
    spark = session(cores, f"bindery audit {directory.run_id}", AUDIT_CONF, with_sources=False)
    shared = directory.path / "checkpoint" / "spark"
    share(spark, shared)
    source = ClusterSource(
        spark, options.zookeeper, options.ledgers_root, options.rate, options.timeout_s, options.security, access
    )

    def work(progress: Any) -> "Outcome":
        return run_audit(
            spark,
            source,
            directory,
            options,
            out=directory.path.parent,
            clock_ms=now_ms,
            progress=progress,
            is_new=is_new,
        )

    try:
        if is_quiet:
            return work(QuietProgress())
        with TerminalProgress(spark, clock=time.monotonic) as progress:
            return work(progress)
    except KeyboardInterrupt:
        if directory.is_begun:
            command = f"bindery audit run --resume {directory.run_id} --out {directory.path.parent}"
            print(f"\ninterrupted; finished groups are kept. To resume: {command}", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        raise
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def _print_outcome(outcome: "Outcome", *, as_json: bool) -> None:
    from bindery_spark.audit.findings.summary import summary_text

    if outcome.unrecorded:
        print(f"bindery: the run was not recorded in the cluster: {outcome.unrecorded}", file=sys.stderr)
    if as_json:
        facts = {"directory": str(outcome.directory.path), **outcome.summary.to_json()}
        print(json.dumps(facts, sort_keys=True))
        return
    path = outcome.directory.path
    print(f"report: {path / 'report.html'}", file=sys.stderr)
    if outcome.findings:
        print(f"all findings: bindery audit show {path.name} --out {path.parent} --findings", file=sys.stderr)
    print(summary_text(outcome.summary, outcome.findings), end="")


def _apply(outcome: "Outcome", options: "Options", *, wanted: bool, yes: bool, as_json: bool) -> None:
    from bindery_spark.audit.apply import apply_to
    from bindery_spark.audit.findings.actions import proposal_text

    proposals = outcome.proposals
    if not proposals:
        return
    report: Callable[[str], None] = lambda line: None if as_json else print(line, file=sys.stderr)  # noqa: E731
    for proposal in proposals[:LISTED_MAX]:
        report(f"{'' if wanted else 'would '}{proposal_text(proposal)}")
    if len(proposals) > LISTED_MAX:
        report(f"and {len(proposals) - LISTED_MAX} more; actions.json lists all")
    if not wanted:
        directory = outcome.directory
        command = f"bindery audit run --resume {directory.run_id} --out {directory.path.parent} --apply"
        report(f"nothing was marked. To mark these ledgers: {command}")
        return
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"mark {len(proposals)} ledgers?", err=True)):
        print("bindery: nothing was marked; pass --yes to mark without confirmation", file=sys.stderr)
        return
    done = apply_to(options.zookeeper, options.ledgers_root, proposals, run_id=outcome.summary.run_id, clock_ms=now_ms)
    outcome.directory.write_applied(done.to_json())
    for ledger_id, why in done.left.items():
        report(f"ledger {ledger_id} was skipped: {why}")
    report(f"marked {len(done.marked)} ledgers; {len(done.already)} were marked already")


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="[RUN]", help="Run id; default: list all runs.")] = "",
    out: Out = Path(OUT_DEFAULT),
    findings: Annotated[bool, typer.Option("--findings", help="Print all findings.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the result of a run, or list all runs. The exit code for a run is that of the run itself."""
    from bindery_spark.audit.checkpoint import runs_in
    from bindery_spark.audit.findings.diff import finding_text
    from bindery_spark.audit.outcome import read_outcome

    if not name:
        runs = runs_in(out)
        if not runs:
            text = f"no runs in {out}. To start one: bindery audit run --zookeeper HOST:PORT --out {out}"
            print(text, file=sys.stderr)
        for one in runs:
            verdict = one.read_json("summary.json")["verdict"] if one.is_finished else "unfinished"
            print(json.dumps({"run_id": one.run_id, "verdict": verdict}) if as_json else f"{one.run_id}  {verdict}")
        return
    outcome = read_outcome(_finished(out, name))
    if findings:
        for finding in outcome.findings:
            print(json.dumps(finding, sort_keys=True) if as_json else finding_text(finding))
    else:
        _print_outcome(outcome, as_json=as_json)
    raise typer.Exit(outcome.summary.exit_code)


@app.command()
def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="Id of the earlier run.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Id of the later run.")],
    out: Out = Path(OUT_DEFAULT),
    as_json: AsJson = False,
) -> None:
    """Compare the findings of two runs. Exit code 0: no differences, 1: differences."""
    from bindery_spark.audit.findings.diff import compare, finding_text, read_findings

    found = compare(*(read_findings(_finished(out, name).findings) for name in (before, after)))
    if as_json:
        print(json.dumps(found.to_json(), sort_keys=True))
    else:
        for finding in found.new:
            print(f"+ {finding_text(finding)}")
        for finding in found.gone:
            print(f"- {finding_text(finding)}")
        for was, now in found.changed:
            print(f"~ {finding_text(now)}\n  was: {finding_text(was)}")
        print(f"{len(found.new)} new, {len(found.gone)} gone, {len(found.changed)} changed", file=sys.stderr)
    raise typer.Exit(0 if found.is_empty else 1)


def _finished(out: Path, name: str) -> "RunDirectory":
    """Return the run. Raise BadRequest if it does not exist or is not finished: its findings are incomplete."""
    from bindery_spark.audit.checkpoint import run_directory

    directory = run_directory(out, name)
    if not directory.is_finished:
        command = f"bindery audit run --resume {directory.run_id} --out {directory.path.parent}"
        raise BadRequest(f"run {directory.run_id} is not finished. To finish it: {command}")
    return directory


def _warn(text: str) -> None:
    print(f"bindery: {text}", file=sys.stderr)


app.command()(export)
app.command()(count)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. `arguments` may begin with `audit`, as under spark-submit."""
    options = list(arguments[1:] if arguments[:1] == ["audit"] else arguments)
    try:
        # Not `app(...)`: if nobody reads the output, it would exit with 1, the code of a verdict; and it would handle
        # an interruption itself.
        with typer.main.get_command(app).make_context("bindery audit", options) as context:
            return int(context.command.invoke(context) or 0)
    except typer.Exit as end:
        return end.exit_code
    except TyperException as error:  # wrong arguments: shows the usage
        error.show()  # type: ignore[attr-defined]  # typer's stubs do not declare it
        return Exit.JOB_ERROR
    except (KeyboardInterrupt, typer.Abort):
        print("\ninterrupted before anything was stored; start the command again", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.JOB_ERROR
    except BinderyError as error:
        print(f"bindery: {error}", file=sys.stderr)
        return Exit.JOB_ERROR
    except Exception as error:
        print(f"bindery: the audit failed: {_first_line(error)}", file=sys.stderr)
        if os.environ.get("BINDERY_TRACEBACK"):
            raise
        return Exit.JOB_ERROR


def _first_line(error: Exception) -> str:
    """Return the line that names the cause. Spark's messages contain stack traces; a BinderyError in them is
    preferred."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("bindery_core.errors.")]
    return (ours or lines or [type(error).__name__])[0][:500]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
