"""Format the statistics of a topic, its subscriptions and their consumers as text."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from bindery_kit.observability.printable import printable

from bindery.common.output import counted
from bindery.common.tables import size_text, table

_UNITS: Final = ((1, "s", 60), (60, "min", 3_600), (3_600, "h", 86_400), (86_400, "d", float("inf")))
"""Seconds of a unit, its name, and the seconds from which on the next one is used."""
UNKNOWN: Final = "-"


def topic_lines(stats: Mapping[str, Any], *, now_ms: int) -> Iterator[str]:
    """Yield lines for the answer of `GET /v1/topics/...`. `now_ms`: present time in ms since 1970."""
    published = ago(stats.get("last_published_at"), now_ms=now_ms)
    partitions = stats.get("partitions")
    places = (
        [("partitions", str(len(partitions)))]
        if partitions
        else [("owner", stats["owner"]), ("first, last", f"{stats['first']}, {stats['last']}")]
    )
    rows = (
        ("topic", stats["topic"]),
        places[0],
        ("stored", _stored(stats)),
        *places[1:],
        ("in", f"{_flow(stats, 'in')}, last {published}"),
        ("out", _flow(stats, "out")),
        ("backlog", f"{size_text(stats['backlog_bytes'])}, oldest {age(stats['oldest_unacked_age_ms'])}"),
    )
    for name, text in rows:
        yield f"{name:<12} {printable(text)}"
    subscriptions = stats["subscriptions"]
    if subscriptions:
        yield ""
        yield from table([_subscription(name, one, now_ms=now_ms) for name, one in subscriptions.items()])
    if partitions:
        yield ""
        yield from table([_partition(index, one, now_ms=now_ms) for index, one in partitions.items()])


def subscription_lines(subscriptions: Sequence[Mapping[str, Any]], *, now_ms: int) -> Iterator[str]:
    """Yield lines for the subscriptions of `GET .../subscriptions`, and their consumers."""
    if not subscriptions:
        yield "no subscriptions; the first consumer creates one"
        return
    rows = [
        _subscription(one["subscription"], {**one, "consumers": len(one["consumers"])}, now_ms=now_ms)
        for one in subscriptions
    ]
    yield from table(rows)
    consumers = [
        _consumer(one["subscription"], consumer, now_ms=now_ms)
        for one in subscriptions
        for consumer in one["consumers"]
    ]
    if consumers:
        yield ""
        yield from table(consumers)


def retention_lines(answer: Mapping[str, Any], *, now_ms: int) -> Iterator[str]:
    """Yield lines for the answer of `GET .../retention`. `now_ms`: present time in ms since 1970."""
    time_s, size_max = answer["time_s"], answer["size_max"]
    limits = [] if time_s is None else [f"{age(round(time_s * 1_000))} after their close"]
    limits += [] if size_max is None else [f"above {size_text(size_max)}"]
    origin = "policy" if answer["is_policy"] else "settings of the broker"
    how = f"deleted {' or '.join(limits)}" if limits else "kept without limit"
    yield f"acknowledged ledgers are {how} ({origin})"
    yield ""
    rows = [
        {
            **({} if one.get("partition") is None else {"partition": one["partition"]}),
            "ledger": one["ledger_id"],
            "entries": one["entries"],
            "size": size_text(one["size"]),
            "closed": "open" if one["closed_at"] is None else ago(one["closed_at"], now_ms=now_ms),
            "reason": one["reason"],
        }
        for one in answer["ledgers"]
    ]
    yield from table(rows)


def age(ms: int | None) -> str:
    """Return a duration as text, such as `1.5 s`, `2 min` or `3 h`."""
    if ms is None:
        return UNKNOWN
    seconds = ms / 1000
    for unit_s, name, limit_s in _UNITS:
        if seconds < limit_s:
            return f"{seconds / unit_s:.1f}".removesuffix(".0") + f" {name}"
    raise AssertionError("every duration has a unit")


def ago(at_ms: int | None, *, now_ms: int) -> str:
    """Return how long ago a time was. None: never."""
    return "never" if at_ms is None else f"{age(max(now_ms - at_ms, 0))} ago"


def _partition(index: str, stats: Mapping[str, Any], *, now_ms: int) -> dict[str, Any]:
    return {
        "partition": index,
        "owner": stats["owner"],
        "stored": _stored(stats),
        "in/s": f"{stats['messages_in_per_s']:g}",
        "out/s": f"{stats['messages_out_per_s']:g}",
        "last": ago(stats.get("last_published_at"), now_ms=now_ms),
    }


def _stored(stats: Mapping[str, Any]) -> str:
    entries, ledgers = counted(stats["entries"], "entry", "entries"), counted(stats["ledgers"], "ledger")
    return f"{entries}, {size_text(stats['size'])}, {ledgers}"


def _flow(stats: Mapping[str, Any], way: str) -> str:
    return (
        f"{counted(stats[f'messages_{way}'], 'message')}, {size_text(stats[f'bytes_{way}'])}; "
        f"{stats[f'messages_{way}_per_s']:g} messages/s, {size_text(stats[f'bytes_{way}_per_s'])}/s"
    )


def _subscription(name: str, stats: Mapping[str, Any], *, now_ms: int) -> dict[str, Any]:
    messages = stats["backlog_messages"]
    about = "" if stats["backlog_messages_exact"] else "~"
    return {
        "subscription": name,
        "type": stats["type"] or UNKNOWN,
        "consumers": stats["consumers"],
        "backlog": counted(stats["backlog_entries"], "entry", "entries"),
        "messages": UNKNOWN if messages is None else f"{about}{messages}",
        "bytes": f"~{size_text(stats['backlog_bytes'])}",
        "oldest": age(stats["oldest_unacked_age_ms"]),
        "unacked": f"{stats['unacked']}{' (blocked)' if stats['blocked_on_unacked'] else ''}",
        "delayed": stats["delayed"],
        "out/s": f"{stats['messages_out_per_s']:g}",
        "acked/s": f"{stats['acked_per_s']:g}",
        "redelivered": stats["redelivered"],
        "last acked": ago(stats["last_acked_at"], now_ms=now_ms),
    }


def _consumer(subscription: str, stats: Mapping[str, Any], *, now_ms: int) -> dict[str, Any]:
    return {
        "consumer": stats["consumer"],
        "subscription": subscription,
        "address": stats["address"] or UNKNOWN,
        "connected": ago(stats["connected_since"], now_ms=now_ms),
        "waiting": stats["calls_open"],
        "unacked": stats["unacked"],
        "messages": stats["messages"],
        "out/s": f"{stats['messages_per_s']:g}",
        "acked": stats["acked"],
        "redelivered": stats["redelivered"],
        "last acked": ago(stats["last_acked_at"], now_ms=now_ms),
    }
