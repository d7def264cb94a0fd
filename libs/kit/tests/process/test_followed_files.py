import asyncio
from pathlib import Path

import pytest
from bindery_identity.followed import FollowedFile
from bindery_kit.process import followed_files
from bindery_kit.process.followed_files import FileFollower
from structlog.testing import capture_logs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("1")
    return path


async def test_each_failure_is_logged_once_and_counted_in_the_metric(path: Path) -> None:
    follower = FileFollower()
    assert follower.render() == b""
    file = FollowedFile(str(path), int)
    follower.follow(file)

    def failures() -> int:
        name, value = follower.render().decode().splitlines()[-1].split()
        assert name == f'bindery_followed_file_failures{{file="{path}"}}'
        return int(value)

    assert failures() == 0
    path.write_text("bad content")
    with capture_logs() as logs:
        await follower.poll()
        await follower.poll()
    assert [line["event"] for line in logs] == ["followed_file_not_usable"]
    assert failures() == 1
    assert file.value == 1
    replaced = []
    follower.on_replaced = lambda: replaced.append(file.value)
    path.write_text("234")
    with capture_logs() as logs:
        await follower.poll()
        await follower.poll()
    assert replaced == [234]
    assert [line["event"] for line in logs] == ["followed_file_read"]
    assert failures() == 0
    assert file.value == 234


async def test_a_replacement_is_logged_although_another_thread_polled(path: Path) -> None:
    """A context of clients polls its files before each connection."""
    follower = FileFollower()
    file = FollowedFile(str(path), int)
    follower.follow(file)
    path.write_text("23")
    assert file.poll()
    with capture_logs() as logs:
        await follower.poll()
        await follower.poll()
    assert [line["event"] for line in logs] == ["followed_file_read"]


async def test_run_polls_until_it_is_cancelled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_files, "POLL_INTERVAL_S", 0.001)
    follower = FileFollower()
    file = FollowedFile(str(path), int)
    follower.follow(file)
    running = asyncio.create_task(follower.run())
    path.write_text("23")
    async with asyncio.timeout(10):
        while file.value != 23:
            await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
