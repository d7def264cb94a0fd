"""`bindery audit`, and the same under spark-submit: `spark-submit .../bindery_spark/main.py audit run ...`.

| exit code | meaning                                                       |
|----------:|---------------------------------------------------------------|
| 0         | healthy (`diff`: the same)                                    |
| 1         | under-replicated, but everything is readable (`diff`: differs)|
| 2         | corrupt or unreadable data                                    |
| 3         | incomplete: not every copy was looked at                      |
| 4         | the job itself failed, wrong usage included                   |
| 130       | interrupted; the run can be resumed                           |

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
from bindery_spark.topics.commands import count, export

if TYPE_CHECKING:
    from bindery_spark.audit.checkpoint import RunDirectory
    from bindery_spark.audit.options import Options
    from bindery_spark.audit.outcome import Outcome

OUT_DEFAULT: Final = "audit-runs"
RATE_DEFAULT: Final = "64MiB/s"
"""More than two cores read. What protects writers: readers pause when a bookie gets slow (`throttle.Pressure`)."""
LISTED_MAX: Final = 20

app = typer.Typer(
    name="audit", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Read every replica of every entry with Spark, and prove it good or list what is wrong.",
)  # fmt: skip
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where runs are kept.", envvar="BINDERY_AUDIT_OUT")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@app.command()
def run(
    zookeeper: Annotated[
        str, typer.Option(metavar="HOST:PORT", envvar="BINDERY_ZOOKEEPER", help="ZooKeeper servers, comma-separated.")
    ] = "127.0.0.1:2181",
    level: Annotated[str, typer.Option(metavar="quick|standard|deep", help="How much is read and checked.")] = "deep",
    out: Out = Path(OUT_DEFAULT),
    ledgers: Annotated[str, typer.Option(metavar="A-B", help="Only these ledgers: 7, 7-20, 7-.")] = "",
    bookie: Annotated[str, typer.Option(metavar="ID", help="Only ledgers that name this bookie.")] = "",
    since_verified: Annotated[
        str, typer.Option(metavar="DURATION", help="Leave out ledgers verified within this time, e.g. 7d.")
    ] = "",
    rate: Annotated[
        str, typer.Option(metavar="BYTES/s", help="Read from each bookie at most; 0: unlimited.")
    ] = RATE_DEFAULT,
    cores: Annotated[int, typer.Option(min=1, max=1024, help="Spark cores, in local mode.")] = 2,
    open_max: Annotated[str, typer.Option(metavar="DURATION", help="A ledger open for longer is a finding.")] = "7d",
    orphan_after: Annotated[
        str, typer.Option(metavar="DURATION", help="A ledger that nothing names is a finding once it is as old.")
    ] = "1h",
    orphans: Annotated[
        bool, typer.Option(help="A deep audit looks for what bookies hold beside, by their admin HTTP.")
    ] = True,
    record: Annotated[
        bool, typer.Option(help="Keep in ZooKeeper what was found whole, and the verdict: for later runs and alerts.")
    ] = True,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="A bookie silent for longer could not say.")] = "10s",
    checkpoint_every: Annotated[
        str,
        typer.Option(metavar="BYTES", help="What an interruption may cost at most; default: 1GiB to 4GiB."),
    ] = "",
    resume: Annotated[
        str, typer.Option(metavar="RUN", help="Go on with this run, or tell a finished one; its own options count.")
    ] = "",
    run_id: Annotated[
        str, typer.Option(metavar="ID", hidden=True, help="Call the run so: for those who find it by its name.")
    ] = "",
    apply: Annotated[bool, typer.Option("--apply", help="Mark what can be healed, for the auditor's workers.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --apply writes.")] = False,
    ledgers_root: Annotated[str, typer.Option(metavar="PATH", help="The cluster's root znode.")] = "/ledgers",
    token_file: Annotated[
        str, typer.Option(metavar="FILE", help="The token to show to bookies (BINDERY_CLIENT_TOKEN_FILE).")
    ] = "",
    ca_file: Annotated[
        str, typer.Option(metavar="FILE", help="Who signed the bookies' certificates; TLS (BINDERY_CLIENT_CA_FILE).")
    ] = "",
    certificate_file: Annotated[
        str, typer.Option(metavar="FILE", help="The certificate to show (BINDERY_CLIENT_CERTIFICATE_FILE).")
    ] = "",
    key_file: Annotated[str, typer.Option(metavar="FILE", help="Its key (BINDERY_CLIENT_KEY_FILE).")] = "",
    auth_plugin: Annotated[
        str, typer.Option(metavar="NAME", help="The bookies' authentication (BINDERY_CLIENT_PLUGIN).")
    ] = "",
    check_hostname: Annotated[
        bool, typer.Option(help="Bookies' certificates name their hosts (BINDERY_CLIENT_CHECK_HOSTNAME).")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Audit a cluster. Changes nothing in it, unless --apply: then ledgers are marked as under-replicated."""
    from bindery_client.connection.security import SecurityFiles

    from bindery_spark.audit.checkpoint import RunDirectory, run_directory
    from bindery_spark.audit.options import Options
    from bindery_spark.audit.outcome import read_outcome
    from bindery_spark.audit.run_lock import held
    from bindery_spark.sources.options import parse_size

    if resume:
        directory = run_directory(out, resume)
        options = Options.from_json(directory.read_options())
        out = directory.path.parent
    else:
        first, last = ledger_range(ledgers or "0-")
        parse_size(rate, name="--rate")
        if not duration_ms(timeout):
            raise BadRequest("option --timeout must be above 0: no bookie answers at once", given=timeout)
        shown = {
            "token_file": token_file, "ca_file": ca_file, "certificate_file": certificate_file, "key_file": key_file,
            "auth_plugin": auth_plugin, "check_hostname": "" if check_hostname else "false",
        }  # fmt: skip
        options = Options(
            zookeeper=zookeeper, ledgers_root=ledgers_root, level=level_of(level), first=first, last=last,
            bookie=bookie or None, since_verified_ms=duration_ms(since_verified) if since_verified else None,
            open_max_ms=duration_ms(open_max), orphan_after_ms=duration_ms(orphan_after), rate=rate,
            timeout_s=duration_ms(timeout) / 1000, group_bytes=bytes_of(checkpoint_every),
            security=SecurityFiles.of(shown, os.environ), orphans=orphans, record=record,
        )  # fmt: skip
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


def _audit(
    directory: "RunDirectory", options: "Options", *, cores: int, is_new: bool, is_quiet: bool
) -> "Outcome":  # fmt: skip
    from bindery_spark.audit.run import run_audit
    from bindery_spark.audit.source import ClusterSource
    from bindery_spark.progress import QuietProgress, TerminalProgress
    from bindery_spark.session import AUDIT_CONF, session, share

    spark = session(cores, f"bindery audit {directory.run_id}", AUDIT_CONF, with_sources=False)
    shared = directory.path / "checkpoint" / "spark"
    share(spark, shared)
    source = ClusterSource(
        spark, options.zookeeper, options.ledgers_root, options.rate, options.timeout_s, options.security
    )

    def work(progress: Any) -> "Outcome":
        return run_audit(
            spark, source, directory, options, out=directory.path.parent, clock_ms=now_ms, progress=progress,
            is_new=is_new,
        )  # fmt: skip

    try:
        if is_quiet:
            return work(QuietProgress())
        with TerminalProgress(spark, clock=time.monotonic) as progress:
            return work(progress)
    except KeyboardInterrupt:
        if directory.is_begun:
            again = f"bindery audit run --resume {directory.run_id} --out {directory.path.parent}"
            print(f"\ninterrupted; what was read is kept. To go on: {again}", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        raise
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def _print_outcome(outcome: "Outcome", *, as_json: bool) -> None:
    from bindery_spark.audit.findings.summary import summary_text

    if outcome.unrecorded:
        print(f"bindery: the cluster was not told of this run: {outcome.unrecorded}", file=sys.stderr)
    if as_json:
        facts = {"directory": str(outcome.directory.path), **outcome.summary.to_json()}
        print(json.dumps(facts, sort_keys=True))
        return
    print(f"report: {outcome.directory.path / 'report.html'}", file=sys.stderr)
    print(summary_text(outcome.summary, outcome.findings), end="")


def _apply(outcome: "Outcome", options: "Options", *, wanted: bool, yes: bool, as_json: bool) -> None:
    from bindery_spark.audit.apply import apply_to
    from bindery_spark.audit.findings.actions import words

    proposals = outcome.proposals
    if not proposals:
        return
    say: Callable[[str], None] = lambda line: None if as_json else print(line, file=sys.stderr)  # noqa: E731
    for proposal in proposals[:LISTED_MAX]:
        say(f"{'' if wanted else 'would '}{words(proposal)}")
    if len(proposals) > LISTED_MAX:
        say(f"and {len(proposals) - LISTED_MAX} more, see actions.json")
    if not wanted:
        say("nothing was marked; --apply does it")
        return
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"mark {len(proposals)} ledgers?", err=True)):
        print("bindery: nothing was marked; --yes does it without asking", file=sys.stderr)
        return
    done = apply_to(
        options.zookeeper, options.ledgers_root, proposals, run_id=outcome.summary.run_id, clock_ms=now_ms
    )  # fmt: skip
    outcome.directory.write_applied(done.to_json())
    for ledger_id, why in done.left.items():
        say(f"ledger {ledger_id} was left alone: {why}")
    say(f"marked {len(done.marked)} ledgers, {len(done.already)} were marked already")


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="[RUN]", help="A run; without it those that are there.")] = "",
    out: Out = Path(OUT_DEFAULT),
    findings: Annotated[bool, typer.Option("--findings", help="Print every finding.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a run found, or which runs there are. The exit code is that of the run."""
    from bindery_spark.audit.checkpoint import runs_in
    from bindery_spark.audit.findings.diff import finding_text
    from bindery_spark.audit.outcome import read_outcome

    if not name:
        for one in runs_in(out):
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
    before: Annotated[str, typer.Argument(metavar="A", help="The earlier run.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The later one.")],
    out: Out = Path(OUT_DEFAULT),
    as_json: AsJson = False,
) -> None:
    """What is new, gone or changed between two runs. Exit code 0: nothing, 1: something."""
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
    """The run of that name. Raises BadRequest when there is none, or when it has no verdict yet: what it has not found
    so far says nothing."""
    from bindery_spark.audit.checkpoint import run_directory

    directory = run_directory(out, name)
    if not directory.is_finished:
        again = f"bindery audit run --resume {directory.run_id} --out {directory.path.parent}"
        raise BadRequest(f"the run {directory.run_id} is not finished: {again}")
    return directory


def _warn(text: str) -> None:
    print(f"bindery: {text}", file=sys.stderr)


app.command()(export)
app.command()(count)


def main(arguments: Sequence[str]) -> int:
    """The exit code. `arguments` may begin with `audit`, as under spark-submit."""
    words = list(arguments[1:] if arguments[:1] == ["audit"] else arguments)
    try:
        return int(app(words, prog_name="bindery audit", standalone_mode=False) or 0)
    except typer.Exit as end:
        return end.exit_code
    except TyperException as error:  # wrong usage: it shows the usage, and what there is instead
        error.show()  # type: ignore[attr-defined]  # typer's stubs do not show it
        return Exit.JOB_ERROR
    except (KeyboardInterrupt, typer.Abort):
        print("\ninterrupted; there is nothing to go on with", file=sys.stderr)
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
    """Spark's messages carry whole stack traces; the cause, where one of ours is named, is what helps."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("bindery_core.errors.")]
    return (ours or lines or [type(error).__name__])[0][:500]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
