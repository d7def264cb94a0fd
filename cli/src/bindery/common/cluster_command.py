"""`cluster_command`: register a coroutine as a command that works on a cluster."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import typer

from bindery.common.operator import run_on
from bindery.common.options import DEFAULT_ZOOKEEPER, LEDGERS_ROOT, LedgersRoot, ZooKeeper

Work = TypeVar("Work", bound=Callable[..., Awaitable[int | None]])
_CONNECTION = tuple(
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, default, annotation in (
        ("zookeeper", DEFAULT_ZOOKEEPER, ZooKeeper),
        ("ledgers_root", LEDGERS_ROOT, LedgersRoot),
    )
)


def cluster_command(app: typer.Typer, name: str) -> Callable[[Work], Work]:
    """Register the decorated coroutine in `app` as the command `name`.

    Its first parameter receives the connected `Cluster`; the others are the arguments and options of the command, which
    gains --zookeeper and --ledgers-root before --json. An integer that it returns is the exit code.
    """

    def register(work: Work) -> Work:
        def command(*, zookeeper: str, ledgers_root: str, **options: Any) -> None:
            if code := run_on(zookeeper, ledgers_root, lambda cluster: work(cluster, **options)):
                raise typer.Exit(code)

        _, *own = inspect.signature(work).parameters.values()
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        last = [parameter for parameter in own if parameter.name == "as_json"]
        parameters = [*(parameter for parameter in own if parameter not in last), *_CONNECTION, *last]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__doc__ = work.__doc__
        app.command(name)(command)
        return work

    return register
