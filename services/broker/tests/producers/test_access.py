"""Transcripts of producers that come and go: each line is a call, and what it does."""

import random

import pytest
from bindery_broker.errors import ProducerBusy, ProducerFenced
from bindery_broker.producers.access import AccessMode, Action, Admitted, Joining, ProducerAccess, Queued, Removed
from bindery_core.errors import BinderyError

MODES = {
    "shared": AccessMode.SHARED,
    "exclusive": AccessMode.EXCLUSIVE,
    "wait": AccessMode.WAIT_FOR_EXCLUSIVE,
    "fence": AccessMode.EXCLUSIVE_FENCING,
}


def said(action: Action) -> str:
    match action:
        case Admitted(number, epoch, raised):
            return f"admit {number} epoch {epoch}{'+' if raised else ''}"
        case Queued(number):
            return f"queue {number}"
        case Removed(number, is_fenced):
            return f"{'fence' if is_fenced else 'replace'} {number}"


def transcript(text: str, *, producers_max: int = 0) -> None:
    """A call is `MODE ID [NAME [EPOCH [TOPIC EPOCH]]]`, `leave ID` or `request`, then `->` and what happens."""
    access = ProducerAccess(topic_epoch=4)
    for line in filter(None, map(str.strip, text.splitlines())):
        call, _, wanted = (part.strip() for part in line.partition("->"))
        verb, *arguments = call.split()
        try:
            if verb == "request":
                access.check_request()
                found: list[Action] = []
            elif verb == "leave":
                found = access.leave(int(arguments[0]))
            else:
                number, name, epoch, topic_epoch = [*arguments, *["", "", ""][len(arguments) - 1 :]]
                found = access.join(
                    Joining(
                        int(number),
                        name or f"p{number}",
                        MODES[verb],
                        int(epoch or 0),
                        int(topic_epoch) if topic_epoch else None,
                    ),
                    producers_max=producers_max,
                )
            result = ", ".join(map(said, found))
        except BinderyError as error:
            result = error.code
        assert result == wanted, line


def test_shared_producers_do_not_wait() -> None:
    transcript("""
        shared 1    -> admit 1 epoch 4
        shared 2    -> admit 2 epoch 4
        exclusive 3 -> producer_fenced
        request     ->
        leave 1     ->
        leave 7     ->
    """)


def test_an_exclusive_producer_keeps_others_out() -> None:
    transcript("""
        exclusive 1 -> admit 1 epoch 5+
        shared 2    -> producer_busy
        exclusive 3 -> producer_fenced
        request     -> producer_busy
        leave 1     ->
        shared 2    -> admit 2 epoch 5
    """)


def test_those_that_wait_get_the_topic_in_turn() -> None:
    transcript("""
        shared 1    -> admit 1 epoch 4
        shared 2    -> admit 2 epoch 4
        wait 3      -> queue 3
        wait 4      -> queue 4
        shared 5    -> producer_busy
        request     -> producer_busy
        exclusive 6 -> producer_fenced
        leave 1     ->
        leave 2     -> admit 3 epoch 5+
        leave 3     -> admit 4 epoch 6+
        leave 4     ->
        wait 7      -> admit 7 epoch 7+
    """)


def test_one_that_waits_can_leave() -> None:
    transcript("""
        exclusive 1 -> admit 1 epoch 5+
        wait 2      -> queue 2
        wait 3      -> queue 3
        leave 2     ->
        leave 1     -> admit 3 epoch 6+
    """)


def test_a_fencing_producer_removes_all_others() -> None:
    transcript("""
        shared 1    -> admit 1 epoch 4
        wait 2      -> queue 2
        fence 3     -> fence 1, fence 2, admit 3 epoch 5+
        fence 4     -> fence 3, admit 4 epoch 6+
        leave 3     ->
        shared 5    -> producer_busy
        leave 4     ->
        request     ->
    """)


def test_a_producer_that_reconnects_keeps_the_topic() -> None:
    transcript("""
        exclusive 1 a 0   -> admit 1 epoch 5+
        exclusive 2 a 1 5 -> replace 1, admit 2 epoch 5
        exclusive 3 a 1 5 -> producer_busy
        leave 1           ->
        shared 4          -> producer_busy
        leave 2           ->
        exclusive 5 a 2 5 -> admit 5 epoch 5
        leave 5           ->
        exclusive 6 b     -> admit 6 epoch 6+
        leave 6           ->
        exclusive 7 a 3 5 -> producer_fenced
    """)


def test_a_holder_that_reconnects_goes_before_those_that_wait() -> None:
    transcript("""
        exclusive 1 a 0 -> admit 1 epoch 5+
        wait 2 b        -> queue 2
        wait 3 a 1 5    -> replace 1, admit 3 epoch 5
        exclusive 4 a 2 5 -> replace 3, admit 4 epoch 5
        leave 4         -> admit 2 epoch 6+
    """)


def test_a_shared_producer_that_waits_instead_makes_room() -> None:
    transcript("""
        shared 1 a 0 -> admit 1 epoch 4
        wait 2 b     -> queue 2
        wait 3 a 1   -> replace 1, queue 3, admit 2 epoch 5+
    """)


def test_a_name_is_connected_once() -> None:
    transcript("""
        shared 1 a 0 -> admit 1 epoch 4
        shared 2 a 0 -> producer_busy
        shared 3 a 1 -> replace 1, admit 3 epoch 4
        wait 4 b     -> queue 4
        wait 5 b 0   -> producer_busy
        wait 6 b 1   -> replace 4, queue 6
        leave 3      -> admit 6 epoch 5+
    """)


def test_the_maximum_refuses_new_producers_and_ends_none() -> None:
    transcript(
        """
        shared 1 a 0 -> admit 1 epoch 4
        shared 2     -> admit 2 epoch 4
        shared 3     -> too_many_producers
        shared 4 a 1 -> replace 1, admit 4 epoch 4
        wait 5       -> queue 5
        shared 6     -> producer_busy
        fence 7      -> fence 2, fence 4, fence 5, admit 7 epoch 5+
        leave 7      ->
        shared 8     -> admit 8 epoch 5
        shared 9     -> admit 9 epoch 5
        shared 10    -> too_many_producers
        leave 8      ->
        shared 10    -> admit 10 epoch 5
        """,
        producers_max=2,
    )


@pytest.mark.parametrize("seed", range(30))
def test_at_most_one_exclusive_producer_is_connected(seed: int) -> None:
    chance = random.Random(seed)
    access = ProducerAccess()
    modes: dict[int, AccessMode] = {}
    epochs = [0]
    for number in range(300):
        before = (list(access.connected), access.waiting, access.topic_epoch)
        if chance.random() < 0.4 and modes:
            gone = chance.choice(list(modes))
            actions = access.leave(gone)
            modes.pop(gone)
        else:
            mode = chance.choice(list(AccessMode))
            joining = Joining(number, chance.choice("abcdef"), mode, epoch=number if chance.random() < 0.3 else 0)
            try:
                actions = access.join(joining)
            except (ProducerBusy, ProducerFenced):
                assert before == (list(access.connected), access.waiting, access.topic_epoch)
                continue
            modes[number] = mode
        for action in actions:
            if isinstance(action, Removed):
                modes.pop(action.id)
            elif isinstance(action, Admitted) and action.raised:
                epochs.append(action.topic_epoch)
        connected = list(access.connected)
        exclusive = [one for one in connected if modes[one] is not AccessMode.SHARED]
        assert not exclusive or connected == exclusive[:1]
        assert connected or not access.waiting
        assert set(connected) | set(access.waiting) == set(modes)
    assert epochs == list(range(len(epochs)))
