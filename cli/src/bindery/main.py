"""The `bindery` command. Verbs import what they need when they run, so that the command itself starts at once.

| exit code | meaning                                     |
|----------:|---------------------------------------------|
| 0         | done                                        |
| 1         | not done; the last line on stderr says why  |
| 2         | wrong usage                                 |
| 3         | done, and it found differences or damage    |
| 130       | interrupted (Ctrl-C)                        |

`bindery audit` has codes of its own: `bindery_spark.main`.

Results go to stdout (JSON with --json), everything else to stderr. A reader that goes away (`| head`) ends it quietly.
"""

import os
import sys
from typing import Annotated, Final

import typer
from bindery_core.errors import BadRequest, BinderyError, MetadataUnreachable

from bindery import audit
from bindery.bookie import commands as bookie
from bindery.cluster import commands as cluster
from bindery.ledger import commands as ledger
from bindery.ledger import ledgers
from bindery.recovery import commands as recovery
from bindery.standalone import commands as standalone
from bindery.topics import commands as topics
from bindery.topics import messages
from bindery.wire import commands as wire

EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
NO_ZOOKEEPER: Final = "; start ZooKeeper, or name its servers with --zookeeper or BINDERY_ZOOKEEPER"
REFUSED: Final = "bookie refuses the operation"
HOW_TO_SHOW: Final = (
    "; bookies that ask who is there are shown what BINDERY_CLIENT_TOKEN_FILE and BINDERY_CLIENT_CA_FILE name"
)

app = typer.Typer(
    name="bindery",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A replicated ledger store and message broker: run a cluster, produce, consume, inspect.",
)
app.add_typer(standalone.app, name="standalone")
app.add_typer(cluster.app, name="cluster")
app.command("produce")(messages.produce)
app.command("consume")(messages.consume)
app.add_typer(topics.app, name="topics")
app.add_typer(ledger.app, name="ledger")
app.add_typer(ledgers.app, name="ledgers")
app.add_typer(recovery.app, name="recovery")
app.add_typer(bookie.app, name="bookie")
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
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """A replicated ledger store and message broker: run a cluster, produce, consume, inspect."""


def main() -> None:
    """Entry point of the command."""
    try:
        app()
    except BinderyError as error:
        fix = NO_ZOOKEEPER if isinstance(error, MetadataUnreachable) else ""
        fix = fix or (HOW_TO_SHOW if REFUSED in str(error) else "")
        print(f"bindery: {error}{fix}", file=sys.stderr)
        sys.exit(EXIT_USAGE if type(error) is BadRequest else EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read us is gone; without this, Python would complain once more while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_ERROR)
