"""Mutants of the broker. An invariant of `judging` must report each of them for some seed.

The conditions name the faults, and the types of subscriptions, that need the fewest seeds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from bindery_simulation.mutant import Kind, MutantTable, Trial
from bindery_simulation.runner import collect
from bindery_simulation.service import faults as service
from bindery_simulation.service.faults import Fault
from bindery_simulation.topics import defects, faults
from bindery_simulation.topics.judging.history import Kind as Type
from bindery_simulation.topics.world import run_seed

COLLECT_EVERY: Final = 10
"""Number of seeds between two collections of garbage. Most runs take little longer than a collection."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The faults to choose from, the types of subscriptions, whether messages may be delayed, or moved, and the
    share of the plans whose targets of moves are remote."""

    faults: tuple[Fault, ...]
    kinds: tuple[Type, ...] = (Type.EXCLUSIVE, Type.SHARED)
    has_delays: bool = False
    has_retries: bool = False
    remote_share: float = 0.0


def _trials(seeds: Iterable[int], conditions: Conditions) -> Iterator[Trial]:
    for number, seed in enumerate(seeds):
        outcome = run_seed(
            seed,
            faults=conditions.faults,
            kinds=conditions.kinds,
            has_delays=conditions.has_delays,
            has_retries=conditions.has_retries,
            remote_share=conditions.remote_share,
        )
        violation = outcome.violation
        if number % COLLECT_EVERY == 0:
            collect()
        yield Trial(seed, 1, None if violation is None else violation.invariant, str(violation or ""))


ANY: Final = Conditions(faults.FAULTS)
KILLS: Final = Conditions((faults.kill_broker,))
STALE: Final = Conditions((faults.lose_session, faults.pause_broker))
CLOSES: Final = Conditions((faults.close_topics,))
BOOKIES: Final = Conditions((service.flaky_connections, service.slow_and_flaky, service.kill_bookie))
BOOKIES_AND_KILLS: Final = Conditions((service.partition, service.slow_and_flaky, faults.kill_broker))
SHARED: Final = Conditions((faults.close_topics,), (Type.SHARED,))
DELAYED: Final = Conditions((faults.close_topics,), (Type.SHARED,), has_delays=True)
SHARED_KILLS: Final = Conditions((faults.kill_broker,), (Type.SHARED,))
EXCLUSIVE: Final = Conditions((faults.close_topics,), (Type.EXCLUSIVE,))
FAILOVER: Final = Conditions((faults.close_topics,), (Type.FAILOVER,))
MOVES: Final = Conditions((faults.kill_broker, faults.stop_broker), (Type.SHARED, Type.KEY_SHARED), has_retries=True)
MOVES_BOOKIES: Final = Conditions(
    (service.partition, service.slow_and_flaky, faults.kill_broker), (Type.SHARED, Type.KEY_SHARED), has_retries=True
)
REMOTE: Final = Conditions(
    (faults.kill_broker, faults.lose_session, faults.cut_brokers),
    (Type.SHARED, Type.KEY_SHARED),
    has_retries=True,
    remote_share=1.0,
)
REMOTE_OWNERS: Final = Conditions(
    (faults.stop_broker, faults.expire_broker), (Type.SHARED, Type.KEY_SHARED), has_retries=True, remote_share=1.0
)
REMOTE_BOOKIES: Final = Conditions(
    (service.slow_and_flaky, service.slow_link, faults.kill_broker),
    (Type.SHARED, Type.KEY_SHARED),
    has_retries=True,
    remote_share=1.0,
)
KEY_SHARED: Final = Conditions((faults.close_topics,), (Type.KEY_SHARED,))

# --- the table: name, what the defect does, invariants that may report it, first seed, conditions, defect ------------

# fmt: off
MUTANTS: Final[MutantTable[Conditions]] = MutantTable(Kind.TOPICS, _trials, (
    ("ack-before-durable", "An acknowledgement is answered when it is in memory.",
     ("no-delivery-after-durable-ack",), 17, KILLS, defects.ack_before_durable),
    ("group-commit-answers-all", "A cursor record answers the acknowledgements that arrived during its write, too.",
     ("no-delivery-after-durable-ack",), 11, KILLS, defects.group_commit_answers_all),
    ("znode-instead-of-record", "A cursor is loaded from its znode, although its ledger has a newer state.",
     ("no-delivery-after-durable-ack",), 1, KILLS, defects.znode_instead_of_record),
    ("batch-index-off-by-one", "The message after the acknowledged one of a batch is acknowledged.",
     ("no-delivery-after-durable-ack", "order-exclusive", "acknowledged-is-delivered"), 1, KILLS,
     defects.batch_index_off_by_one),
    ("whole-batch-acknowledged", "The acknowledgement of one message of a batch acknowledges the batch.",
     ("acknowledged-is-delivered", "order-exclusive", "trim-keeps-unacknowledged"), 1, KILLS,
     defects.whole_batch_acknowledged),
    ("cumulative-one-too-far", "A cumulative acknowledgement includes the next entry.",
     ("acknowledged-is-delivered", "order-exclusive", "trim-keeps-unacknowledged"), 3, KILLS,
     defects.cumulative_one_too_far),
    ("seek-keeps-acks", "A seek keeps the acknowledgements after its target.",
     ("seek-delivers-again", "order-exclusive", "trim-keeps-unacknowledged"), 3, CLOSES, defects.seek_keeps_acks),
    ("seek-not-stored", "A seek is answered when it is in memory.",
     ("seek-delivers-again", "no-delivery-after-durable-ack", "order-exclusive", "acknowledged-is-delivered",
      "trim-keeps-unacknowledged"), 7, KILLS, defects.seek_not_stored),
    ("last-ledger-not-fenced", "A topic is opened without fencing its last ledger.",
     ("stale-owner-changes-nothing", "trim-keeps-unacknowledged", "acknowledged-is-delivered", "nothing-invented"), 17,
     STALE, defects.last_ledger_not_fenced),
    ("cursor-ledger-not-fenced", "The ledger of a cursor is read without fencing it.",
     ("stale-owner-changes-nothing", "no-delivery-after-durable-ack"), 56, STALE, defects.cursor_ledger_not_fenced),
    ("znodes-without-versions", "The znodes of a topic are written whatever their versions are.",
     ("stale-owner-changes-nothing",), 17, STALE, defects.znodes_without_versions),
    ("cursors-without-check", "The znodes of cursors are written without a check of the ownership.",
     ("stale-owner-changes-nothing",), 37, STALE, defects.cursors_without_check),
    ("trimmed-too-far", "One more ledger is deleted than the cursors have acknowledged.",
     ("trim-keeps-unacknowledged",), 0, CLOSES, defects.trimmed_too_far),
    ("fastest-cursor-trims", "The cursor that is farthest decides what is deleted.",
     ("trim-keeps-unacknowledged",), 0, CLOSES, defects.fastest_cursor_trims),
    ("settled-too-much", "After a ledger has failed, all entries in flight count as stored in it.",
     ("acknowledged-is-delivered", "nothing-invented", "no-crash"), 0, BOOKIES, defects.settled_too_much),
    ("settled-too-little", "After a ledger has failed, its last entry is stored again in the next one.",
     ("nothing-invented",), 8, BOOKIES, defects.settled_too_little),
    ("published-before-durable", "Messages are acknowledged when they are sent to the bookies.",
     ("acknowledged-is-delivered", "nothing-invented", "trim-keeps-unacknowledged"), 9, BOOKIES_AND_KILLS,
     defects.published_before_durable),
    ("expired-lease-forgotten", "The messages of an expired lease are not returned.",
     ("acknowledged-is-delivered", "seek-delivers-again"), 0, SHARED, defects.expired_lease_forgotten),
    ("rewind-forgotten", "After a rewind, an exclusive consumer continues with the next message.",
     ("order-exclusive", "acknowledged-is-delivered"), 0, EXCLUSIVE, defects.rewind_forgotten),
    ("leaving-counts", "The messages of a consumer that leaves count as redelivered.",
     ("redelivery-counts-match-returns",), 3, SHARED, defects.leaving_counts),
    ("counts-lost", "A returned message that is read again has the redelivery count 0.",
     ("redelivery-counts-never-go-down", "redelivery-counts-match-returns"), 0, SHARED, defects.counts_lost),
    ("counts-not-loaded", "A broker that opens a topic begins with redelivery counts of 0.",
     ("redelivery-counts-never-go-down",), 7, CLOSES, defects.counts_not_loaded),
    ("delivered-before-counted", "A returned message is delivered before its redelivery count is stored.",
     ("redelivery-counts-never-go-down",), 42, SHARED_KILLS, defects.delivered_before_counted),
    ("exclusive-not-checked", "A second consumer may use an exclusive subscription.",
     ("one-active-consumer",), 0, EXCLUSIVE, defects.exclusive_not_checked),
    ("active-with-each-call", "Every consumer of a failover subscription gets messages.",
     ("one-active-consumer", "order-exclusive"), 0, FAILOVER, defects.active_with_each_call),
    ("kept-by-former-consumer", "The former active consumer of a failover subscription keeps what it holds.",
     ("order-exclusive",), 0, FAILOVER, defects.kept_by_former_consumer),
    ("taken-from-former-consumer", "A new active consumer does not wait for acknowledgements of the former one.",
     ("handover-waits",), 0, FAILOVER, defects.taken_from_former_consumer),
    ("key-moves-at-once", "A key goes to another consumer although messages of it are held.",
     ("order-per-key",), 0, KEY_SHARED, defects.key_moves_at_once),
    ("key-overtaken", "Later messages of a key are delivered while returned ones wait.",
     ("order-per-key",), 0, KEY_SHARED, defects.key_overtaken),
    ("delay-ignored", "Delayed messages are delivered at once.", ("never-early",), 0, DELAYED, defects.delay_ignored),
    ("delivered-while-held", "A message that is held is delivered to others, too.",
     ("one-lease",), 0, SHARED, defects.delivered_while_held),
    ("moved-without-intent", "Messages are moved without a record of the intent.",
     ("one-copy", "moved-is-not-delivered"), 9, MOVES, defects.moved_without_intent),
    ("copies-not-searched", "After a crash, the messages of a move are delivered again; no copies are searched.",
     ("one-copy", "moved-is-not-delivered"), 9, MOVES, defects.copies_not_searched),
    ("copies-assumed", "After a crash, the messages of a move count as copied.",
     ("move-loses-nothing",), 11, MOVES, defects.copies_assumed),
    ("moved-after-ack", "Messages are acknowledged before their copies are written.",
     ("move-loses-nothing", "trim-keeps-unacknowledged"), 3, MOVES, defects.moved_after_ack),
    ("unknown-is-refused", "A copy of unknown outcome counts as refused.",
     ("one-copy", "moved-is-not-delivered"), 1067, MOVES_BOOKIES, defects.unknown_is_refused),
    ("read-before-settled", "A subscription is read before the moves of the former owner are settled.",
     ("one-copy", "moved-is-not-delivered"), 11, MOVES, defects.read_before_settled),
    ("copies-reversed", "The copies of a request are written in reverse.",
     ("copies-in-order",), 0, MOVES, defects.copies_reversed),
    ("epoch-not-checked", "The owner of a target stores copies of an earlier epoch.",
     ("one-copy", "moved-is-not-delivered"), 16, REMOTE, defects.epoch_not_checked),
    ("epoch-continued", "A move to a topic of another broker continues the epoch of the one before.",
     ("one-copy", "moved-is-not-delivered"), 16, REMOTE, defects.epoch_continued),
    ("begun-during-writes", "The owner of a target begins a move while it writes copies of the one before.",
     ("one-copy", "moved-is-not-delivered"), 24, REMOTE_BOOKIES, defects.begun_during_writes),
    ("local-move-keeps-epoch", "A move of the owner of the target does not end the epoch of another broker.",
     ("one-copy", "moved-is-not-delivered"), 274, REMOTE_OWNERS, defects.local_move_keeps_epoch),
    ("unanswered-is-refused", "If the owner of the target does not answer, the copies count as refused.",
     ("one-copy", "moved-is-not-delivered", "trim-keeps-unacknowledged"), 5, REMOTE, defects.unanswered_is_refused),
    ("other-owner-not-searched", "A target that another broker owns is not searched for copies.",
     ("one-copy", "moved-is-not-delivered"), 26, REMOTE, defects.other_owner_not_searched),
), unit="seeds")
# fmt: on
