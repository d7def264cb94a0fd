"""Share the clusters (see clusters.py) and one driver between all cases. Every case runs for every column."""

from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from bindery_client.settings import ClientSettings

from e2e.interop.actors import Actor, JavaActor, OurActor
from e2e.interop.clusters import Cluster, Clusters, our_client
from e2e.interop.jars import JavaMissing, class_path
from e2e.interop.java import Refused
from e2e.interop.table import DOCUMENT, FAILED, Table

JAVA_SETTINGS: Final = {
    "v3": {"useV2WireProtocol": "false"},
    "v2": {"useV2WireProtocol": "true"},
    "explicit": {"explicitLacInterval": "50"},
}


@dataclass(frozen=True)
class Column:
    actor: str
    """`java v3`, `java v2`, `bindery v3` or `bindery v2`."""
    cluster: str

    @property
    def title(self) -> str:
        who, _, version = self.actor.partition(" ")
        return f"{ {'java': 'Java', 'bindery': 'ours'}[who] } {version} → {self.cluster}"


COLUMNS: Final = (
    Column("java v3", "bindery"),
    Column("java v2", "bindery"),
    Column("bindery v3", "apache"),
    Column("bindery v2", "apache"),
    Column("java v3", "mixed"),
    Column("java v2", "mixed"),
    Column("bindery v3", "mixed"),
    Column("bindery v2", "mixed"),
    Column("java v3", "apache"),
    Column("java v2", "apache"),
)
CLIENT_TABLE: Final = Table("ledger cases", "case", tuple(column.title for column in COLUMNS))
TOOL_TABLE: Final = Table("tools", "tool", ("bindery", "mixed", "apache"))
AUTORECOVERY_TABLE: Final = Table("auto-recovery", "auto-recovery", ("bindery", "mixed", "apache"))
SECURED_TABLE: Final = Table("secured cluster", "program", ("open", "shared", "creator"))
TABLES: Final = (CLIENT_TABLE, TOOL_TABLE, AUTORECOVERY_TABLE, SECURED_TABLE)


@dataclass
class Side:
    """One column: the acting client, the other client, and the cluster."""

    column: Column
    actor: Actor
    other: Actor
    cluster: Cluster
    verdicts: list[str] = field(default_factory=list)

    @property
    def is_java(self) -> bool:
        return self.column.actor.startswith("java")

    @property
    def is_v2(self) -> bool:
        return self.column.actor.endswith("v2")

    async def refused(self, doing: Awaitable[Any], *, java: str, ours: str) -> None:
        """Check that `doing` is refused with exactly this text, which the table shows. `a or b`: depends on timing."""
        expected = java if self.is_java else ours
        with pytest.raises(Refused) as caught:
            await doing
        assert caught.value.name in expected.split(" or "), str(caught.value)
        self.say(f"refused: {expected}")

    def say(self, verdict: str) -> None:
        if verdict not in self.verdicts:
            self.verdicts.append(verdict)


def other_of(actor: str) -> str:
    """The other client, in the same protocol."""
    who, _, version = actor.partition(" ")
    return f"{ {'java': 'bindery', 'bindery': 'java'}[who] } {version}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="write the tables into docs/compatibility.md")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run case by case instead of column by column, in the order of the tables; compare the document last.

    Timeouts are long: the first case of a cluster includes its start, which takes minutes on a busy machine.
    """
    items.sort(key=lambda item: item.name == "test_the_document_shows_what_this_run_saw")
    for item in items:
        if item.get_closest_marker("interop") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Resolve the jars before the tests: the first download takes longer than the timeout of a test."""
    if session.config.option.collectonly or not session.items:
        return
    try:
        class_path()
    except JavaMissing as missing:
        pytest.exit(str(missing), returncode=1)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Record the outcome of each case in its table."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call" or (report.when == "setup" and report.failed):
        place = item.funcargs.get("table_place") if hasattr(item, "funcargs") else None
        if place is not None:
            table, column, verdicts = place
            said = "; ".join(verdicts) or "ok"
            table.put(row_of(item), column, said if report.passed else FAILED)


def row_of(item: pytest.Item) -> str:
    """Name of the case: the first line of its docstring, with parameters in braces replaced."""
    function = item.obj  # type: ignore[attr-defined]
    title: str = (function.__doc__ or function.__name__).strip().splitlines()[0].rstrip(".")
    values = {name: value for name, value in item.callspec.params.items() if isinstance(value, str)}  # type: ignore[attr-defined]
    return title.format(**values)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def clusters(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clusters]:
    world = Clusters(Path(tmp_path_factory.mktemp("interop")))
    try:
        await world.start()
        yield world
    finally:
        await world.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def actors(clusters: Clusters) -> AsyncIterator[dict[tuple[str, str], Actor]]:
    """Every client on every cluster, by (actor, cluster)."""
    found: dict[tuple[str, str], Actor] = {}
    async with our_client() as connect:
        for name in ("bindery", "apache", "mixed"):
            for protocol, settings in JAVA_SETTINGS.items():
                java = JavaActor(clusters.driver, name=f"{protocol}-{name}", uri=clusters[name].uri, settings=settings)
                await java.connect()
                found[f"java {protocol}", name] = java
            for version in (3, 2):
                client = await connect(clusters[name].zookeeper, settings=ClientSettings(wire_version=version))
                found[f"bindery v{version}", name] = OurActor(client, name=f"ours-v{version}-{name}")
        yield found


@pytest.fixture(params=COLUMNS, ids=lambda column: f"{column.actor} to {column.cluster}".replace(" ", "-"))
def side(request: pytest.FixtureRequest, clusters: Clusters, actors: dict[tuple[str, str], Actor]) -> Side:
    column: Column = request.param
    other = other_of(column.actor)
    return Side(column, actors[column.actor, column.cluster], actors[other, column.cluster], clusters[column.cluster])


@pytest.fixture
def explicit_lac(side: Side, actors: dict[tuple[str, str], Actor]) -> Actor:
    """The other client with explicit LAC when it is idle. Bindery's client always sends it."""
    return side.other if side.is_java else actors["java explicit", side.column.cluster]


@pytest.fixture
def table_place(side: Side) -> tuple[Table, str, list[str]]:
    return CLIENT_TABLE, side.column.title, side.verdicts


def document_differences() -> list[str]:
    text = DOCUMENT.read_text()
    return [line for table in TABLES for line in table.differences(text)]
