"""The `bindery` command.

Commands import what they need when they run, so that `bindery --help` starts at once. `bindery.common.exit_codes` lists
the exit codes and `bindery.common.output` describes the output. If the reader of stdout goes away (`| head`), the
command ends without a message. If stdout cannot be written for another reason, such as a full disk, the command reports
that and ends with FAILURE.
"""

import errno
import os
import sys
from typing import Annotated, Any, Final

import typer
from bindery_core.errors import BadRequest, BinderyError, Corrupt, MetadataUnreachable
from typer.exceptions import TyperException

from bindery import audit
from bindery.bookie import commands as bookie
from bindery.brokers import commands as brokers
from bindery.certificates import commands as certificates
from bindery.cluster import commands as cluster
from bindery.common import exit_codes
from bindery.common.options import HELP_NAMES
from bindery.common.output import report_error, wants_json
from bindery.common.url_options import UrlGroup
from bindery.ledger import commands as ledger
from bindery.ledger import ledgers
from bindery.namespaces import commands as namespaces
from bindery.namespaces import permissions, tenants, topic_policies
from bindery.recovery import commands as recovery
from bindery.standalone import commands as standalone
from bindery.tokens import commands as tokens
from bindery.topics import commands as topics
from bindery.topics import dead_letters, schemas, subscriptions
from bindery.topics.consume import consume
from bindery.topics.exclusive import release
from bindery.topics.limits import limits
from bindery.topics.produce import produce
from bindery.wire import commands as wire

NO_ZOOKEEPER: Final = "; start ZooKeeper, or name its servers with --zookeeper or BINDERY_ZOOKEEPER"
"""Advice added to the error if ZooKeeper does not answer."""
REFUSED: Final = "bookie refuses the operation"
"""Part of the error for a bookie that rejects an operation, usually because the client did not authenticate."""
HOW_TO_AUTHENTICATE: Final = "; to authenticate to bookies, set BINDERY_CLIENT_TOKEN_FILE or BINDERY_CLIENT_CA_FILE"
"""Advice added to an error that contains REFUSED."""
_WRITE_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""Errors of a stdout without a buffer (PYTHONUNBUFFERED)."""

app = typer.Typer(
    name="bindery",
    cls=UrlGroup,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP_NAMES,
)
app.add_typer(standalone.app, name="standalone")
app.add_typer(cluster.app, name="cluster")
app.command("produce")(produce)
app.command("consume")(consume)
app.add_typer(topics.app, name="topics")
topics.app.command("policies")(topic_policies.policies)
topics.app.command("set-policy")(topic_policies.set_policy)
topics.app.command("release")(release)
app.add_typer(brokers.app, name="brokers")
app.add_typer(tenants.app, name="tenants")
app.add_typer(namespaces.app, name="namespaces")
app.add_typer(permissions.app, name="permissions")
app.add_typer(subscriptions.app, name="subscriptions")
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(schemas.app, name="schemas")
app.command("limits")(limits)
app.add_typer(ledger.app, name="ledger")
app.add_typer(ledgers.app, name="ledgers")
app.add_typer(recovery.app, name="recovery")
app.add_typer(bookie.app, name="bookie")
app.add_typer(tokens.app, name="tokens")
app.add_typer(certificates.app, name="certificates")
app.add_typer(wire.app, name="wire")
app.command("audit", context_settings=audit.SETTINGS)(audit.audit)


def _show_version(wanted: bool) -> None:
    if wanted:
        from bindery_core.version import VERSION

        print(f"bindery {VERSION}")
        raise typer.Exit


@app.callback()
def bindery(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run a replicated ledger store and message broker, send and receive messages, inspect and repair data.

    Example: bindery standalone --detach && echo hello | bindery produce greetings

    Exit codes: 0 success, 1 failure, 2 wrong usage, 3 the command found corruption or differences, 130 interrupted.
    Commands whose help lists exit codes use these meanings.
    """


def main() -> None:
    """Run the command and exit. Errors are one line on stderr, as JSON with --json."""
    as_json = wants_json(sys.argv[1:])
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends); print() would take stdout instead
    if sys.stdout is None:
        print("bindery: stdout is closed; to discard the output, redirect it to /dev/null", file=sys.stderr)
        sys.exit(exit_codes.FAILURE)
    try:
        code = _run(as_json=as_json)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        code = exit_codes.FAILURE
    except OSError as error:
        if not _is_of_stdout(error):
            raise
        _discard_stdout()
        report_error(f"cannot write to stdout: {error.strerror}", code="output_failed", as_json=as_json)
        code = exit_codes.FAILURE
    sys.exit(code)


def _run(*, as_json: bool) -> Any:
    """Run the command, report its errors, and return the code to exit with. Raises OSError."""
    try:
        if as_json:
            return _run_without_messages()
        app()
    except SystemExit as ended:
        return ended.code
    except BinderyError as error:
        advice = NO_ZOOKEEPER if isinstance(error, MetadataUnreachable) else ""
        advice = advice or (HOW_TO_AUTHENTICATE if REFUSED in str(error) else "")
        exit_code = _exit_code(error)
        report_error(f"{error}{advice}", code=error.code, exit_code=exit_code, as_json=as_json)
        return exit_code
    except TyperException as error:
        report_error(error.format_message(), code="usage", exit_code=error.exit_code, as_json=as_json)
        return error.exit_code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except typer.Abort:  # Ctrl-C or Ctrl-D at a question; with --json, Typer does not handle it
        report_error("not confirmed", code="aborted", exit_code=exit_codes.FAILURE, as_json=as_json)
        return exit_codes.FAILURE
    return exit_codes.OK


def _is_of_stdout(error: OSError) -> bool:
    """Return whether an error comes from stdout: what could not be written is still in its buffer, if it has one."""
    if getattr(sys.stdout, "write_through", False):
        return error.filename is None and error.errno in _WRITE_ERRORS
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _discard_stdout() -> None:
    """Discard what is left in stdout. Otherwise, Python would print another error when it flushes stdout at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code(error: BinderyError) -> int:
    if type(error) is BadRequest:
        return exit_codes.USAGE
    return exit_codes.DAMAGE if isinstance(error, Corrupt) else exit_codes.FAILURE


def _run_without_messages() -> int:
    """Run the command and return its exit code. Raises TyperException for wrong usage instead of printing it."""
    code: Any = app(standalone_mode=False)
    return code if isinstance(code, int) else exit_codes.OK
