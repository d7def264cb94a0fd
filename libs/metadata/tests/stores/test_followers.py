"""Followers read a node again after each change, after errors, and until they are stopped."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from bindery_core.errors import BadRequest, BadVersion, BinderyError, Corrupt, MetadataUnavailable, Unauthorized
from bindery_metadata.stores.followers import REFUSED_RETRY_S_MAX, WATCH_RETRY_S, End, Followers
from bindery_metadata.stores.store import Watch
from bindery_simulation.instant import InstantLoop


class Node:
    """Counts the reads of a node, and raises the errors that are planned for the next ones."""

    def __init__(self, *errors: Exception | None) -> None:
        self.watches: list[Watch] = []
        self.times: list[float] = []
        self._errors = list(errors)

    async def look(self, changed: Watch) -> None:
        self.watches.append(changed)
        self.times.append(asyncio.get_running_loop().time())
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            raise error


def simulated(work: Callable[[Followers], Awaitable[None]]) -> None:
    async def main() -> None:
        followers = Followers()
        try:
            await work(followers)
        finally:
            await followers.close()

    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        runner.run(main())


def test_a_node_is_read_at_once_and_after_each_change() -> None:
    async def work(followers: Followers) -> None:
        node = Node()
        followers.follow("node", node.look)
        assert len(followers) == 1
        await asyncio.sleep(1)
        assert len(node.watches) == 1
        for count in (2, 3):
            node.watches[-1]()
            await asyncio.sleep(1)
            assert len(node.watches) == count

    simulated(work)


def test_an_earlier_watch_does_not_cause_another_read() -> None:
    async def work(followers: Followers) -> None:
        node = Node()
        followers.follow("node", node.look)
        await asyncio.sleep(1)
        node.watches[0]()
        await asyncio.sleep(1)
        node.watches[0]()
        await asyncio.sleep(1)
        assert len(node.watches) == 2

    simulated(work)


def test_a_change_during_the_read_is_not_missed() -> None:
    async def work(followers: Followers) -> None:
        count = 0

        async def look(changed: Watch) -> None:
            nonlocal count
            count += 1
            if count < 3:
                changed()

        followers.follow("node", look)
        await asyncio.sleep(1)
        assert count == 3

    simulated(work)


@pytest.mark.parametrize("error", [Corrupt("junk"), BadVersion("newer")])
def test_unreadable_data_waits_for_the_next_change(error: BinderyError) -> None:
    async def work(followers: Followers) -> None:
        node = Node(error)
        followers.follow("node", node.look)
        await asyncio.sleep(100)
        assert len(node.watches) == 1
        node.watches[0]()
        await asyncio.sleep(1)
        assert len(node.watches) == 2

    simulated(work)


def test_a_failed_read_is_repeated_after_a_delay() -> None:
    async def work(followers: Followers) -> None:
        began = asyncio.get_running_loop().time()
        node = Node(MetadataUnavailable("down"), MetadataUnavailable("down"))
        followers.follow("node", node.look)
        await asyncio.sleep(100)
        assert [time - began for time in node.times] == [0.0, WATCH_RETRY_S, 2 * WATCH_RETRY_S]

    assert WATCH_RETRY_S == 0.5
    simulated(work)


def test_the_owner_ends_the_following_from_its_read() -> None:
    async def work(followers: Followers) -> None:
        node = Node(None, End())
        followers.follow("node", node.look)
        await asyncio.sleep(1)
        node.watches[0]()
        await asyncio.sleep(1)
        assert len(followers) == 0
        assert len(node.watches) == 2

    simulated(work)


def test_one_node_is_stopped_and_the_others_go_on() -> None:
    async def work(followers: Followers) -> None:
        one, two = Node(), Node()
        stop = followers.follow("one", one.look)
        followers.follow("two", two.look)
        await asyncio.sleep(1)
        stop()
        await asyncio.sleep(1)
        assert len(followers) == 1
        one.watches[0]()
        two.watches[0]()
        await asyncio.sleep(1)
        assert (len(one.watches), len(two.watches)) == (1, 2)
        stop()

    simulated(work)


def test_after_the_close_no_task_is_left() -> None:
    async def work(followers: Followers) -> None:
        node = Node(MetadataUnavailable("down"))
        followers.follow("one", node.look)
        followers.follow("two", Node().look)
        await asyncio.sleep(0.1)
        await followers.close()
        assert len(followers) == 0
        await asyncio.sleep(100)
        assert len(node.watches) == 1

    simulated(work)


@pytest.mark.parametrize("error", [BadRequest("no such path"), Unauthorized("the access list refuses")])
def test_a_refused_read_is_repeated_ever_more_rarely_and_logged_until_it_succeeds(
    error: BinderyError, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(followers: Followers) -> None:
        node = Node(*[error] * 12, None, error)
        followers.follow("node", node.look, topic="t")
        await asyncio.sleep(1_000)
        waits = [after - before for before, after in itertools.pairwise(node.times)]
        assert waits == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, *[REFUSED_RETRY_S_MAX] * 5])
        node.watches[-1]()
        await asyncio.sleep(10)
        assert node.times[-1] - node.times[-2] == pytest.approx(WATCH_RETRY_S), "a success ends the back-off"

    simulated(work)
    lines = [record for record in caplog.records if record.message == "node_watch_refused"]
    assert len(lines) == 13
    assert (lines[0].error, lines[0].retry_in_s, lines[0].topic) == (str(error), 0.5, "t")  # type: ignore[attr-defined]
