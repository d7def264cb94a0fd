"""run_program: run the `main` of a service, with settings, logs, and the life cycle in an event loop.

Exit codes: 0 after a requested stop, 1 after an error, 2 for settings that cannot be used.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from bindery_kit.configuration.settings import Settings, load, warn_of_unknown_variables
from bindery_kit.observability import last_words, logs
from bindery_kit.process.runtime import EXIT_USAGE, Shutdown, run_service

S = TypeVar("S", bound=Settings)


def run_program(
    program: str,
    settings_type: type[S],
    serve: Callable[[S, Shutdown], Awaitable[int]],
    argv: Sequence[str] | None,
    *,
    service: str,
    description: str,
    check: Callable[[S], Sequence[type[Settings]]] | None = None,
) -> int:
    """Read the settings, set up logging, and run `serve` until it returns. Return the exit code.

    `service`: the name in log events. `check`: called when logging is set up, for the service's own checks; it returns
    further settings types, whose environment variables are not reported as unknown. `settings_type` has a field
    `log_level`.
    """
    settings = load(settings_type, argv, prog=program, description=description)
    values: Any = settings
    prefix = settings_type.model_config["env_prefix"]
    if values.log_level not in logs.LEVELS:
        last_words.say(program, f"--log-level ({prefix}LOG_LEVEL) must be one of {', '.join(logs.LEVELS)}")
        return EXIT_USAGE
    logs.configure(service=service, level=values.log_level)
    others = check(settings) if check else ()
    warn_of_unknown_variables(prefix, settings_type, *others)
    return run_service(lambda shutdown: serve(settings, shutdown), program=program)
