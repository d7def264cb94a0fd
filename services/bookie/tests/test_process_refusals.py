"""Errors of operators, each with a real process: the last line has the error, its cause and its fix."""

import random
import shutil
import signal
import socket
from pathlib import Path

import pytest
import structlog
from bindery_bookie.main import warn_of_memory_limit
from bindery_bookie.settings import BookieSettings
from bindery_core.ids import BookieId
from bindery_kit.limits.container import memory_limit
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.cluster import initialize_cluster
from bookie_process import ID, Bookie

pytestmark = pytest.mark.integration


@pytest.fixture
def bookie(real_bookie: Bookie, monkeypatch: pytest.MonkeyPatch) -> Bookie:
    monkeypatch.setenv("BINDERY_TERMINATION_LOG", str(real_bookie.directory / "message"))
    return real_bookie


async def last_words(bookie: Bookie, *, code: int = 1, **changes: str) -> str:
    """Return the last line of a start that fails with `code`; the termination message is the same line."""
    bookie.launch(**changes)
    assert await bookie.exit_code() == code, bookie.log.read_text()
    log = bookie.log.read_text()
    assert "Traceback" not in log
    last = log.splitlines()[-1]
    assert (bookie.directory / "message").read_text() == last
    program, _, said = last.partition(": ")
    assert program == "bindery-bookie"
    return said


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (
            {"port": "70000"},
            2,
            "wrong settings: --port (BOOKIE_PORT): must be a whole number, at least 0, at most 65535,",
        ),
        ({"host": "0.0.0.0"}, 1, "refusing to listen on 0.0.0.0, where other machines can connect"),
        ({"bookie_id": "a/b"}, 1, "not a bookie id: 'a/b'; set BOOKIE_BOOKIE_ID to letters, digits"),
        ({"log_level": "loud"}, 2, "--log-level (BOOKIE_LOG_LEVEL) must be one of debug, info"),
        ({"zookeeper": "zk"}, 1, "not a list of zookeeper servers (host:port,host:port[/chroot]): hosts=zk"),
        ({"host": "192.0.2.1", "insecure": "true"}, 2, "unrecognized arguments: true; `bindery-bookie --help`"),
    ],
)
async def test_a_wrong_value_is_refused_with_its_reason(
    bookie: Bookie, changes: dict[str, str], code: int, said: str
) -> None:
    assert (await last_words(bookie, code=code, **changes)).startswith(said)


async def test_the_error_of_a_value_from_the_environment_names_its_variable(
    bookie: Bookie, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOKIE_MEMORY_SIZE_MAX", "lots")
    monkeypatch.setenv("BOOKIE_INSECURE", "perhaps")
    said = await last_words(bookie, code=2)
    assert "(BOOKIE_MEMORY_SIZE_MAX): must be a whole number, at least" in said
    assert "(BOOKIE_INSECURE): must be true or false, got 'perhaps'" in said


async def test_settings_of_embedded_recovery_are_read_before_the_start(
    bookie: Bookie, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOKIE_AUTORECOVERY_EMBEDDED", "true")
    monkeypatch.setenv("BOOKIE_RECOVERY_WORKERS", "many")
    assert "(BOOKIE_RECOVERY_WORKERS): must be a whole number" in await last_words(bookie, code=2)


async def test_unknown_variables_are_logged_with_the_nearest_name(
    bookie: Bookie, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BOOKIE_JOURNAL_DIRR", "BOOKIE_RECOVERY_WORKERS", "BOOKIE_LOG_LEVEL", "bookie_storrage_drills"):
        monkeypatch.setenv(name, "info" if name == "BOOKIE_LOG_LEVEL" else "1")
    await last_words(bookie, zookeeper="zk")
    told = [line for line in bookie.log.read_text().splitlines() if "unknown_setting" in line]
    assert len(told) == 2
    assert "BOOKIE_JOURNAL_DIRR is not a setting and has no effect; did you mean BOOKIE_JOURNAL_DIR?" in told[0]
    assert "did you mean BOOKIE_STORAGE_DRILLS?" in told[1]


@pytest.mark.parametrize("which", ["journal_dir", "ledger_dir"])
async def test_the_error_of_an_unusable_directory_contains_the_fix(bookie: Bookie, which: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place, fix in (("/proc/none", "is its volume mounted?"), (str(file), "set a path that is a directory")):
        said = await last_words(bookie, **{which: place})
        assert said.startswith(f"cannot use {place}")
        assert f"; {fix}" in said


async def test_the_error_of_a_port_in_use_contains_the_fix(bookie: Bookie) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for which in ("port", "http_port"):
            assert await last_words(bookie, **{which: port}) == (
                f"cannot listen on 127.0.0.1:{port}: Address already in use; another process uses that port: stop it, "
                "or pass another port"
            )


@pytest.mark.parametrize("name", ["no-such-bookie.invalid", "b-0.no-namespace..svc", f"{'b' * 64}.svc"])
async def test_an_advertised_name_that_does_not_resolve_does_not_end_the_process(bookie: Bookie, name: str) -> None:
    await bookie.start(advertised_host=name)
    status, body = await bookie.http("/readyz")
    assert status == 200
    assert f"the name {name}, under which clients connect to this bookie, does not resolve" in body
    assert "set BOOKIE_ADVERTISED_HOST to a name that does" in body


async def served(bookie: Bookie) -> None:
    """Start the bookie, and stop it."""
    await bookie.start()
    assert await bookie.end(signal.SIGTERM) == 0


async def test_a_second_start_of_a_running_bookie_is_refused(bookie: Bookie, tmp_path: Path) -> None:
    """The second start changes no file."""
    await bookie.start()
    assert bookie.process is not None
    (tmp_path / "second").mkdir()
    second = type(bookie)(tmp_path / "second", bookie.arguments["--zookeeper"], bookie.layout.root)
    (bookie.directory / "ledgers/current/index/CURRENT").unlink()  # a start that is not refused would rebuild the index
    before = sorted((path, path.stat().st_size) for path in bookie.directory.glob("*/current/*"))
    directories = {f"{kind}_dir": bookie.arguments[f"--{kind}-dir"] for kind in ("journal", "ledger")}
    second.launch(**directories)
    assert await second.exit_code() == 1
    last = second.log.read_text().splitlines()[-1]
    assert last == (
        f"bindery-bookie: another bookie (pid {bookie.process.pid}) uses {bookie.directory}/journal: is this bookie "
        "started twice? Stop one of the two, or set other directories"
    )
    assert sorted((path, path.stat().st_size) for path in bookie.directory.glob("*/current/*")) == before


async def test_disks_of_another_bookie_are_refused(bookie: Bookie) -> None:
    await served(bookie)
    said = await last_words(bookie, bookie_id="bookie-1")
    journal = f"{bookie.directory}/journal/current/VERSION"
    assert said.startswith(f"these are not the disks of bookie-1: {journal} has bookie id {ID}, not bookie-1, ")
    assert f"These are disks of {ID}. Were disks swapped? Put them back, or start with the right id." in said
    assert "`" not in said
    assert "bindery bookie cookie adopt --zookeeper" in said


async def test_disks_of_another_cluster_are_refused(bookie: Bookie, metadata) -> None:
    await served(bookie)
    layout = type(bookie.layout)(f"{bookie.layout.root}-other")
    await initialize_cluster(metadata, layout, randomness=random.Random(2))
    said = await last_words(bookie, ledgers_root=layout.root)
    assert "has instance id" in said
    assert "The data is another cluster's." in said


async def test_a_bookie_whose_cookie_was_deleted_is_refused(bookie: Bookie, metadata) -> None:
    await served(bookie)
    cookies = CookieStore(metadata, bookie.layout)
    found = await cookies.read(BookieId(ID))
    assert found is not None
    await cookies.delete(BookieId(ID), version=found.version)
    said = await last_words(bookie)
    assert said.startswith(f"{ID} has no cookie in this cluster, but these directories contain its data: ")
    assert "bindery bookie cookie adopt" in said


async def test_an_empty_volume_of_a_known_bookie_is_refused(bookie: Bookie) -> None:
    await served(bookie)
    shutil.rmtree(bookie.directory / "ledgers")
    said = await last_words(bookie, storage_on_lost_storage="refuse")
    assert said.startswith(f"{ID} has a cookie in the cluster, but no VERSION file in: {bookie.directory}/ledgers")
    assert "Mount it and start again." in said


def test_the_memory_limit_of_the_container_is_read_for_both_cgroup_versions(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    assert memory_limit(tmp_path) is None, "none, as version 1 says it"
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1048576\n")
    assert memory_limit(tmp_path) == 2**20
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path) == 2**20, "what version 2 does not limit, version 1 may"
    (tmp_path / "memory.max").write_text("2097152\n")
    assert memory_limit(tmp_path) == 2**21


@pytest.mark.parametrize(
    ("limit", "told"), [(None, 0), (2**30, 0), (2**29 + 2**26, 0), (2**29 + 2**26 - 1, 1), (2**29 - 1, 1)]
)
def test_a_warning_about_a_small_container_has_both_sizes(limit: int | None, told: int) -> None:
    with structlog.testing.capture_logs() as logs:
        warn_of_memory_limit(BookieSettings(memory_size_max=2**29), limit)
    assert len(logs) == told
    for event in logs:
        assert (event["limit"], event["memory_size_max"]) == (limit, 2**29)
        assert "Raise the container's memory limit, or lower BOOKIE_MEMORY_SIZE_MAX" in event["reason"]
