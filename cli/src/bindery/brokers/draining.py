"""`bindery brokers drain|undrain`: move the bundles of a broker to the others. Ctrl-C ends only the display."""

import time
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from bindery.common import exit_codes
from bindery.common.operator import duration_text
from bindery.common.options import AsJson
from bindery.common.output import counted, emit, print_json, report_error
from bindery.common.progress import Progress
from bindery.topics.options import Url

POLL_S: Final = 0.5
"""Seconds between two reads of the progress."""
BLOCKED_S: Final = 30.0
"""Seconds without progress after which --wait gives up, because no other broker takes the bundles that are left."""

Broker = Annotated[
    str,
    typer.Argument(metavar="[BROKER]", help="Broker, HOST:PORT; default: the one at --url.", show_default=False),
]


def drain(
    broker: Broker = "local",
    wait: Annotated[
        bool, typer.Option("--wait", help="Show the progress until it is complete; Ctrl-C ends only the display.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Move all bundles of a broker to the others, and give it no more. No request fails meanwhile.

    The broker goes on answering: it passes requests on to the brokers that have the topics now. Its /readyz answers 503
    until the drain is cancelled by `bindery brokers undrain`, or the broker is started again. A broker that is stopped
    with SIGTERM drains itself. Run the command again to see the progress.

    Example: bindery brokers drain 10.0.0.7:8080 --wait

    Exit codes: 0 the drain is started (with --wait: the broker has no bundles), 1 failed, or no broker takes them.
    """
    from bindery.topics.broker_api import Broker

    path = f"/v1/brokers/{quote(broker, safe='')}/drain"
    with Broker(url) as client:
        status = client.post(path, {})
        if not wait:
            emit(status, _sentence(status), as_json=as_json)
            if status["state"] != "drained":
                Progress(is_quiet=as_json).say("--wait shows the progress, `bindery brokers undrain` cancels the drain")
            return
        live = Progress(status["moved"] + status["left"], "bundles", is_quiet=as_json)
        moved, moved_at = status["moved"], time.monotonic()
        while status["state"] == "draining":
            if as_json:
                print_json({"kind": "progress", **status})
            live.show(_sentence(status))
            if status["moved"] > moved:
                moved, moved_at = status["moved"], time.monotonic()
            if status["blocked"] and time.monotonic() - moved_at > BLOCKED_S:
                live.clear()
                report_error(
                    f"no other broker takes the {counted(status['left'], 'bundle')} that {status['broker']} still has: "
                    "start one, or cancel with `bindery brokers undrain`",
                    code="drain_blocked",
                    exit_code=exit_codes.FAILURE,
                    as_json=as_json,
                )
                raise typer.Exit(exit_codes.FAILURE)
            time.sleep(POLL_S)
            status = client.get(path)
        live.clear()
    emit(status, _sentence(status), as_json=as_json)
    if status["state"] != "drained":  # somebody has cancelled it
        raise typer.Exit(exit_codes.FAILURE)


def undrain(broker: Broker = "local", url: Url = None, as_json: AsJson = False) -> None:
    """Cancel the drain of a broker, so that it gets bundles again. Bundles that have moved stay where they are.

    Example: bindery brokers undrain 10.0.0.7:8080
    """
    from bindery.topics.broker_api import Broker

    with Broker(url) as client:
        status = client.post(f"/v1/brokers/{quote(broker, safe='')}/undrain", {})
    emit(status, f"{status['broker']} takes bundles again; it has {counted(status['left'], 'bundle')}", as_json=as_json)


def add_to(app: typer.Typer) -> None:
    """Add these commands to `bindery brokers`."""
    app.command("drain")(drain)
    app.command("undrain")(undrain)


def _sentence(status: dict[str, Any]) -> str:
    name = status["broker"]
    if status["state"] == "drained":
        return f"{name} is drained: {counted(status['moved'], 'bundle')} moved in {status['seconds']:.1f} s"
    if status["state"] == "active":
        return f"{name} is not being drained; it has {counted(status['left'], 'bundle')}"
    if status["blocked"]:
        return f"{name}: no other broker takes the {counted(status['left'], 'bundle')} that are left"
    eta = "" if status["eta_s"] is None else f", about {duration_text(status['eta_s'])} left"
    return f"{name}: {status['moved']} moved, {status['left']} left, {status['rate']:g} bundles/s{eta}"
