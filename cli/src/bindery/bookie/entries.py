"""Describe one entry in the files of a bookie as text and as JSON."""

import base64
from typing import Any, Final

from bindery_bookie.offline.views import Found

from bindery.common.entry_facts import UNKNOWN, candidates, escaped, examine

PREVIEW_SIZE: Final = 200
"""Maximum number of payload bytes shown as text."""


def entry_facts(found: Found, *, password: bytes, decode: bool) -> dict[str, Any]:
    """Return the location of the entry, the verdicts on both digests, header and payload."""
    facts: dict[str, Any] = {"found_in": found.kind, "path": found.path, "offset": found.offset}
    if found.record is not None:
        facts["record"] = found.record
    facts["bookie_verdict"] = "damaged" if found.problem else "good"
    if found.problem:
        facts["problem"] = found.problem
    examined = examine(found.body, candidates(password))
    facts |= examined.as_json()
    facts["payload_base64"] = base64.b64encode(examined.payload).decode()
    if decode:
        from bindery.common.pulsar_entry import describe_messages

        facts["messages"] = describe_messages(examined.payload)
    return facts


def entry_lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts of `entry_facts` as lines of text."""
    record = f", record {facts['record']} of the group" if "record" in facts else ""
    problem = f": {facts['problem']}" if "problem" in facts else ""
    lines = [f"{facts['found_in']} {facts['path']} at {facts['offset']}{record}"]
    lines.append(f"  bookie's digest  {facts['bookie_verdict']}{problem}")
    if "ledger_id" in facts:
        lines.append(
            f"  header           ledger {facts['ledger_id']}, entry {facts['entry_id']}, lac {facts['lac']}, "
            f"ledger length {facts['length']}"
        )
    verdict = facts["digest_verdict"]
    why = ": damaged, or a mac, which needs --password-file" if verdict == UNKNOWN else ""
    lines.append(f"  writer's digest  {' '.join(filter(None, (facts.get('digest_type'), verdict)))}{why}")
    payload = base64.b64decode(facts["payload_base64"])
    shown = escaped(payload[:PREVIEW_SIZE]) + (" ..." if len(payload) > PREVIEW_SIZE else "")
    lines.append(f"  payload          {len(payload)} bytes: {shown}")
    if "messages" in facts:
        from bindery.common.pulsar_entry import message_lines

        lines += [f"  {text}" for text in message_lines(payload)]
    return lines
