"""`bindery audit export` and `bindery audit count`: jobs over the messages of one topic.

Results go to stdout (JSON with --json), everything else to stderr. Exit codes: 0, 4 for a failure, 130 if interrupted
(see `main`).
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bindery_spark.arguments import EXIT_INTERRUPTED, duration_ms
from bindery_spark.security_options import (
    AuthPlugin,
    CaFile,
    CertificateFile,
    CheckHostname,
    KeyFile,
    TokenFile,
)

if TYPE_CHECKING:
    from pyarrow import Table

WAIT_S: Final = 0.5
"""Interval in seconds at which a running query is polled. Ctrl-C takes effect within this time."""
KEYS_SHOWN_MAX: Final = 20
"""Maximum number of keys that are printed."""

ZooKeeper = Annotated[
    str,
    typer.Option(
        "--zookeeper",
        metavar="HOST:PORT",
        envvar="BINDERY_ZOOKEEPER",
        help="ZooKeeper servers, comma-separated, then the chroot.",
    ),
]
TopicOption = Annotated[
    str,
    typer.Option("--topic", metavar="TOPIC", help="Topic name: t or tenant/namespace/t; all its partitions are read."),
]
Rate = Annotated[str, typer.Option("--rate", metavar="BYTES/s", help="Maximum payload read rate; 0: unlimited.")]
Cores = Annotated[int, typer.Option("--cores", min=1, max=1024, help="Number of Spark cores in local mode.")]
LedgersRoot = Annotated[str, typer.Option("--ledgers-root", metavar="PATH", help="Root znode of the cluster.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _options(zookeeper: str, ledgers_root: str, topic: str, rate: str, cores: int) -> dict[str, str]:
    """Return the options of the data source. Its rate is per task, and `cores` tasks run at a time."""
    from bindery_spark.sources.options import parse_size

    each = parse_size(rate, name="--rate") / cores
    return {"zookeeper": zookeeper, "ledgers_root": ledgers_root, "topic": topic, "rate": f"{each:.3f}"}


def _files(
    token_file: str, ca_file: str, certificate_file: str, key_file: str, auth_plugin: str, *, check_hostname: bool
) -> dict[str, str]:
    """Return the options of the data source that name files with credentials, also those of the environment: a JVM that
    runs already has another one."""
    from bindery_spark.sources.options import named_files

    given = {
        "token_file": token_file,
        "ca_file": ca_file,
        "certificate_file": certificate_file,
        "key_file": key_file,
        "auth_plugin": auth_plugin,
        "check_hostname": "" if check_hostname else "false",
    }
    return named_files(given, os.environ)


def export(
    topic: TopicOption,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new directory for the Parquet files.")],
    start: Annotated[
        str, typer.Option("--from", metavar="T", help="First publish time (2026-03-01T12:00:00Z) or LEDGER:ENTRY.")
    ] = "earliest",
    end: Annotated[
        str, typer.Option("--to", metavar="T", help="Publish time (exclusive) or last LEDGER:ENTRY (inclusive).")
    ] = "latest",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing export.")] = False,
    zookeeper: ZooKeeper = "127.0.0.1:2181",
    rate: Rate = "0",
    cores: Cores = 2,
    ledgers_root: LedgersRoot = "/ledgers",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
    certificate_file: CertificateFile = "",
    key_file: KeyFile = "",
    auth_plugin: AuthPlugin = "",
    check_hostname: CheckHostname = True,
    as_json: AsJson = False,
) -> None:
    """Write a topic's messages to Parquet, with key, properties and ids. Only reads the cluster."""
    from bindery_spark.progress import QuietProgress, TerminalProgress
    from bindery_spark.session import session
    from bindery_spark.sources import cluster
    from bindery_spark.sources.topic.options import TopicOptions
    from bindery_spark.topics.export import check_target
    from bindery_spark.topics.export import export as run_export

    options = {**_options(zookeeper, ledgers_root, topic, rate, cores), "start": start, "end": end}
    options |= _files(token_file, ca_file, certificate_file, key_file, auth_plugin, check_hostname=check_hostname)
    parsed = TopicOptions.parse(options)
    check_target(out, overwrite=overwrite)
    cluster.check_access(parsed.zookeeper, parsed.ledgers_root, parsed.security, parsed.access)
    began = time.monotonic()
    spark = session(cores, f"bindery export {topic}")
    out = out.resolve()
    if as_json:
        facts = run_export(spark, options, out, overwrite=overwrite, progress=QuietProgress())
        print(json.dumps({**facts, "directory": str(out)}, sort_keys=True))
        return
    with TerminalProgress(spark, clock=time.monotonic) as progress:
        facts = run_export(spark, options, out, overwrite=overwrite, progress=progress)
    if facts["problems"]:
        print(f"bindery: {facts['problems']} rows have a problem; see the column `problem`", file=sys.stderr)
    print(f"{facts['rows']} messages of {facts['topic']} in {out}, {time.monotonic() - began:.1f} s")


def count(
    topic: TopicOption,
    checkpoint: Annotated[
        Path, typer.Option("--checkpoint", metavar="DIR", help="Directory of positions and counts, used to resume.")
    ],
    start: Annotated[
        str, typer.Option("--from", metavar="T", help="Start: earliest, latest, a publish time or LEDGER:ENTRY.")
    ] = "earliest",
    until_now: Annotated[
        bool, typer.Option("--until-now", help="Stop after the present messages; default: run until Ctrl-C.")
    ] = False,
    every: Annotated[str, typer.Option(metavar="DURATION", help="Interval between polls for new messages.")] = "5s",
    max_entries: Annotated[
        int, typer.Option("--max-entries", min=0, help="Maximum entries of one micro-batch; 0: unlimited.")
    ] = 0,
    skip_lost: Annotated[
        bool, typer.Option("--skip-lost", help="Continue if retention deleted messages before they were counted.")
    ] = False,
    zookeeper: ZooKeeper = "127.0.0.1:2181",
    rate: Rate = "0",
    cores: Cores = 2,
    ledgers_root: LedgersRoot = "/ledgers",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
    certificate_file: CertificateFile = "",
    key_file: KeyFile = "",
    auth_plugin: AuthPlugin = "",
    check_hostname: CheckHostname = True,
    as_json: AsJson = False,
) -> None:
    """Count a topic's messages by key as a stream. Each message counts exactly once across restarts."""
    from bindery_spark.session import session
    from bindery_spark.sources import cluster
    from bindery_spark.sources.topic.options import TopicOptions
    from bindery_spark.topics.count import read_counts, start_count

    options = _options(zookeeper, ledgers_root, topic, rate, cores)
    options |= _files(token_file, ca_file, certificate_file, key_file, auth_plugin, check_hostname=check_hostname)
    options |= {"start": start, "max_entries_per_trigger": str(max_entries)}
    options["fail_on_data_loss"] = "false" if skip_lost else "true"
    parsed = TopicOptions.parse(options)
    every_s = None if until_now else duration_ms(every) / 1000
    checkpoint = checkpoint.resolve()
    cluster.check_access(parsed.zookeeper, parsed.ledgers_root, parsed.security, parsed.access)

    def print_batch(batch_id: int, counts: "Table") -> None:
        messages = sum(counts["messages"].to_pylist())
        print(f"batch {batch_id}: {messages} messages, {counts.num_rows} keys", file=sys.stderr, flush=True)

    spark = session(cores, f"bindery count {topic}")
    query = start_count(spark, options, checkpoint, every_s=every_s, on_batch=print_batch)
    try:
        while not query.awaitTermination(WAIT_S):  # type: ignore[arg-type]  # fractions of seconds are valid
            pass
    except KeyboardInterrupt:
        query.stop()
        print("\ninterrupted; run the same command to resume", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        _print_counts(read_counts(checkpoint), topic, as_json=as_json)


def _print_counts(counts: "Table", topic: str, *, as_json: bool) -> None:
    rows = counts.to_pylist()
    messages, unreadable = (sum(row[name] for row in rows) for name in ("messages", "unreadable"))
    if as_json:
        facts = {"topic": topic, "messages": messages, "unreadable": unreadable, "keys": rows}
        print(json.dumps(facts, sort_keys=True))
        return
    for row in rows[:KEYS_SHOWN_MAX]:
        print(f"{row['messages']:>12}  {'(no key)' if row['key'] is None else row['key']}")
    if len(rows) > KEYS_SHOWN_MAX:
        print(f"and {len(rows) - KEYS_SHOWN_MAX} more keys")
    print(f"{messages:>12}  messages" + (f", and {unreadable} entries that cannot be read" if unreadable else ""))
