"""`bindery dead-letters`: list the messages that a subscription could not process, move them back, or discard them."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from bindery_core.errors import BadRequest

from bindery.common import exit_codes
from bindery.common.operator import now_ms, parse_duration, parse_time
from bindery.common.options import AsJson, group
from bindery.common.output import confirm, counted, emit, print_json, print_lines, report_error
from bindery.topics.options import Topic, Url

if TYPE_CHECKING:
    from bindery.topics.broker_api import Broker

PAGE_MAX: Final = 500
"""Number of messages of one request: a redrive of as many takes a second or so, and shows its progress."""
IDS_MAX: Final = 10_000
"""Maximum number of ids in one command."""
MESSAGE_ID_SHOWN_MAX: Final = 64
"""Maximum number of characters of a wrong id in an error."""

app = group("List, move back and discard the dead letters of a subscription.")

Name = Annotated[str, typer.Argument(metavar="SUBSCRIPTION", show_default=False, help="Subscription of TOPIC.")]
Ids = Annotated[
    list[str] | None,
    typer.Option("--message-id", metavar="ID", help="Only this message, by its id in the list; repeatable."),
]
DeadLetterTopic = Annotated[
    str | None,
    typer.Option(metavar="TOPIC", help="Dead-letter topic, if it has not the default name TOPIC-SUBSCRIPTION-DLQ."),
]

InitialSubscription = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Subscription of the dead-letter topic that keeps its messages; default: dead-letters."
    ),
]


@app.command("list")
def list_dead_letters(
    topic: Topic,
    name: Name,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of messages to list.")] = 100,
    after: Annotated[
        str | None, typer.Option(metavar="ID", help="Continue after this message, the last one of an earlier list.")
    ] = None,
    dead_letter_topic: DeadLetterTopic = None,
    initial_subscription: InitialSubscription = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters, oldest first, with their origin and the number of retries. --json prints one array.

    Example: bindery dead-letters list orders billing

    Exit codes: 0 success, 1 no such topic or subscription, 2 wrong usage.
    """
    from bindery.common.tables import table
    from bindery.topics.broker_api import Broker

    if after is not None:
        _check_id(after, option="--after")
    path, place = _path(topic, name), _place(dead_letter_topic, initial_subscription)
    found: list[dict[str, Any]] = []
    with Broker(url) as broker:
        following = after
        while True:
            answer = broker.get(path, limit=min(limit - len(found), PAGE_MAX), after=following, **place)
            found += answer["messages"]
            following = answer.get("next")
            if following is None or len(found) >= limit:
                break
    if as_json:
        print_json(found)
    elif found:
        print_lines(table([_row(letter, at_ms=now_ms()) for letter in found]))
    else:
        print_lines([f"no dead letters in {answer['topic']}"])
    if following is not None:
        print(f"more may follow; continue with --after {following}", file=sys.stderr)


@app.command("redrive")
def redrive(
    topic: Topic,
    name: Name,
    ids: Ids = None,
    max_count: Annotated[
        int | None, typer.Option("--max", metavar="N", min=1, help="Maximum number of messages to move; default: all.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Move nothing, and print what would be moved.")] = False,
    dead_letter_topic: DeadLetterTopic = None,
    initial_subscription: InitialSubscription = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Move dead letters back to their subscription, which delivers them again at once.

    Each is moved exactly once, also if the command is interrupted and repeated. Its number of retries begins again at
    0. Messages that become dead letters meanwhile may be moved, too.

    Examples:

      bindery dead-letters redrive orders billing --dry-run

      bindery dead-letters redrive orders billing --max 10

    Exit codes: 0 all of them are moved, 1 no such topic or subscription, or a message could not be moved, 2 wrong
    usage.
    """
    from bindery.common.progress import Progress
    from bindery.topics.broker_api import Broker

    if ids and max_count is not None:
        raise BadRequest("--max and --message-id exclude each other")
    _check_ids(ids)
    path, place = _path(topic, name), _place(dead_letter_topic, initial_subscription)
    done: dict[str, Any] = {"moved": 0, "skipped": 0, "failed": 0, "dry_run": dry_run}
    failures: list[dict[str, Any]] = []
    with Broker(url) as broker:
        total = len(ids) if ids else _count(broker, path, max_count, place)
        progress = Progress(total, "messages", is_quiet=as_json)
        try:
            for body in _pages_of_ids(ids) if ids else _pages(done, max_count):
                answer = broker.post(f"{path}/redrive", {**body, **place, "dry_run": dry_run})
                for count in ("moved", "skipped", "failed"):
                    done[count] += answer[count]
                failures += answer.get("failures", [])
                progress.update(min(done["moved"], total))
                if not ids:
                    done["next"] = answer.get("next")
        except BaseException:
            progress.clear()
            if done["moved"]:
                print(f"{_moved(done)} before this error", file=sys.stderr)
            raise
        progress.clear()
    done.pop("next", None)
    if failures:
        done["failures"] = failures[:PAGE_MAX]
    emit(done, _moved(done), as_json=as_json)
    if done["failed"]:
        first = failures[0]
        report_error(
            f"{counted(done['failed'], 'message')} could not be moved and "
            f"{'stays a dead letter' if done['failed'] == 1 else 'stay dead letters'}; first: {first['message_id']}: "
            f"{first['detail']} ({first['code']})",
            code="not_moved",
            as_json=as_json,
        )
        raise typer.Exit(exit_codes.FAILURE)


@app.command("purge")
def purge(
    topic: Topic,
    name: Name,
    ids: Ids = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only messages that are dead letters for 90s, 10m, 1h30m or 2d.")
    ] = None,
    before: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only messages that became dead letters before 2026-12-01T08:00:00Z."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    dead_letter_topic: DeadLetterTopic = None,
    initial_subscription: InitialSubscription = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Discard dead letters after a confirmation: all of them, old ones, or those with the given ids.

    They are acknowledged in the dead-letter topic. Its other subscriptions, if it has any, keep them.

    Examples:

      bindery dead-letters purge orders billing --older-than 7d --yes

      bindery dead-letters purge orders billing --message-id 5:0:-1:-1

    Exit codes: 0 discarded, 1 no such topic or subscription, or not confirmed, 2 wrong usage or --yes is missing.
    """
    from bindery.topics.broker_api import Broker

    if sum(bool(given) for given in (ids, older_than, before)) > 1:
        raise BadRequest("--message-id, --older-than and --before exclude each other")
    _check_ids(ids)
    body: dict[str, Any] = {}
    which = "all dead letters"
    if ids:
        which = counted(len(ids), "dead letter")
    elif older_than is not None:
        body["before"] = _time_before(older_than)
        which = f"the dead letters older than {older_than}"
    elif before is not None:
        body["before"] = parse_time(before)
        which = f"the dead letters from before {before}"
    path, place = _path(topic, name), _place(dead_letter_topic, initial_subscription)
    body |= place
    purged = 0
    with Broker(url) as broker:
        if not yes:
            held = _held(broker, path, place)
            if held is None:
                emit({"purged": 0}, "there are no dead letters", as_json=as_json)
                return
            confirm(
                f"Discard {which} of {name}? ({held})", unattended=f"{held}: pass --yes to confirm", as_json=as_json
            )
        if ids:
            for page in _pages_of_ids(ids):
                purged += broker.post(f"{path}/purge", {**body, **page})["purged"]
        else:
            following: str | None = None
            while True:
                answer = broker.post(f"{path}/purge", body if following is None else {**body, "after": following})
                purged += answer["purged"]
                following = answer.get("next")
                if following is None:
                    break
    emit({"purged": purged}, f"{counted(purged, 'dead letter')} discarded", as_json=as_json)


def _pages(done: Mapping[str, Any], max_count: int | None) -> Iterator[dict[str, Any]]:
    """Yield the bodies of requests until `done` has no next page, or until `max_count` messages are moved."""
    body: dict[str, Any] = {}
    while True:
        left = PAGE_MAX if max_count is None else min(PAGE_MAX, max_count - done["moved"])
        yield {**body, "max": left}
        following = done["next"]
        if following is None or (max_count is not None and done["moved"] >= max_count):
            return
        body["after"] = following


def _pages_of_ids(ids: Sequence[str]) -> Iterator[dict[str, Any]]:
    for first in range(0, len(ids), PAGE_MAX):
        yield {"message_ids": list(ids[first : first + PAGE_MAX])}


def _count(broker: "Broker", path: str, max_count: int | None, place: Mapping[str, str]) -> int:
    """Return how many messages are to be moved, for the progress; 0: unknown, or too few to show any."""
    about = None if place else _about(broker, path)
    count = 0 if about is None else int(about["backlog_entries"])
    return count if max_count is None else min(count, max_count)


def _held(broker: "Broker", path: str, place: Mapping[str, str]) -> str | None:
    """Return how many entries may be discarded, as text; None: there are no dead letters."""
    answer = broker.get(path, limit=1, **place)  # loads the topic, so that `_about` finds it
    if not answer["messages"] and answer.get("next") is None:
        return None
    about = None if place else _about(broker, path)
    if about is None:
        return f"the number of dead letters in {answer['topic']} is unknown"
    count = about["backlog_entries"]
    return f"{counted(count, 'entry', 'entries')} {'is' if count == 1 else 'are'} not acknowledged in {about['topic']}"


def _about(broker: "Broker", path: str) -> dict[str, Any] | None:
    """Return what the subscription's view has of its dead-letter topic; None: it has no topic with the default name."""
    about = broker.get(path.removesuffix("/dead-letters") + "/explain")["subscription"].get("dead_letters")
    return about if about is None else dict(about)


def _check_ids(ids: Sequence[str] | None) -> None:
    if ids and len(ids) > IDS_MAX:
        raise BadRequest(f"at most {IDS_MAX} ids are allowed in one command", given=len(ids))
    for text in ids or ():
        _check_id(text, option="--message-id")


def _check_id(text: str, *, option: str) -> None:
    """Raise BadRequest, which names the option, for what is no message id."""
    from bindery_pulsar.message_id import MessageId

    try:
        MessageId.parse(text)
    except BadRequest:
        raise BadRequest(
            f"{option} needs a message id; the format is ledger:entry:partition:index, such as 5:0:-1:-1",
            given=text[:MESSAGE_ID_SHOWN_MAX],
        ) from None


def _time_before(older_than: str) -> int:
    """Return the time that was as long ago as the text of --older-than, in ms since 1970. Raises BadRequest."""
    age_s = parse_duration(older_than)
    now = now_ms()
    if age_s * 1_000 > now:
        raise BadRequest("--older-than must not reach back to before 1970", given=older_than)
    return now - round(age_s * 1_000)


def _path(topic: str, name: str) -> str:
    from bindery.topics.broker_api import subscription_path, topic_path

    return f"{topic_path(topic)}{subscription_path(name)}/dead-letters"


def _place(topic: str | None, initial_subscription: str | None) -> dict[str, str]:
    """Return the fields of a request that say where dead letters are, other than in the default place."""
    place = {"topic": None if topic is None else _named(topic), "initial_subscription": initial_subscription}
    return {name: value for name, value in place.items() if value is not None}


def _named(topic: str) -> str:
    """Return the name of a topic as TENANT/NAMESPACE/NAME."""
    from urllib.parse import unquote

    from bindery.topics.broker_api import topic_path

    return "/".join(unquote(part) for part in topic_path(topic).split("/")[3:])


def _moved(done: Mapping[str, Any]) -> str:
    count = done["moved"]
    text = f"{counted(count, 'dead letter')} {'would be moved' if done['dry_run'] else 'moved'}"
    return f"{text}, {done['skipped']} had been moved or discarded before" if done["skipped"] else text


def _row(letter: Mapping[str, Any], *, at_ms: int) -> dict[str, Any]:
    from bindery.topics.stats_text import ago

    return {
        "message id": letter["message_id"],
        "origin": letter.get("origin_message_id"),
        "retries": letter.get("reconsume_times"),
        "since": ago(letter["publish_time"], now_ms=at_ms),
        "key": letter.get("key") or letter.get("key_base64"),
        "size": letter["size"],
    }
