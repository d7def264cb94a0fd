"""The plan of a standalone cluster: processes, ports, identities, limits."""

from pathlib import Path

import pytest
from bindery.standalone.directory import StandaloneError
from bindery.standalone.options import Options
from bindery.standalone.plan import plan_cluster
from bindery_core.errors import BadRequest
from bindery_metadata.stores.access_lists import NewNodes
from bindery_metadata.stores.embedded import ServerSpec
from bindery_metadata.stores.zookeeper_access import AccessFiles


def fake_zookeeper(server: ServerSpec, ensemble: object) -> list[str]:
    return ["zookeeper", str(server.client_port)]


def test_the_plan_gives_each_process_its_ports_and_an_identity_without_ports() -> None:
    plan = plan_cluster(Options(port_offset=100), root=Path("/d"), zookeeper_command=fake_zookeeper)
    assert [process.name for process in plan.processes] == [
        "zookeeper-0",
        "bookie-0",
        "bookie-1",
        "bookie-2",
        "bookie-3",
        "broker-0",
        "auditor-0",
    ]
    assert plan.zookeeper_servers == "127.0.0.1:2281"
    assert [dict(bookie.ports) for bookie in plan.bookies][1] == {"HTTP": 8101, "BookKeeper protocol": 3282}
    assert plan.broker_urls == ["http://127.0.0.1:8180"]
    identity = plan.bookies[1].command[plan.bookies[1].command.index("--bookie-id") + 1]
    assert identity == "bookie-1"


def test_auditors_have_names_ports_and_the_short_delay() -> None:
    plan = plan_cluster(Options(auditors=2, port_offset=100), root=Path("/d"), zookeeper_command=fake_zookeeper)
    assert [dict(auditor.ports) for auditor in plan.auditors] == [{"HTTP": 8190}, {"HTTP": 8191}]
    assert plan.auditor_urls == ["http://127.0.0.1:8190", "http://127.0.0.1:8191"]
    command = plan.auditors[1].command
    assert command[command.index("--name") + 1] == "auditor-1"
    assert command[command.index("--lost-bookie-delay-s") + 1] == "10"
    assert command[command.index("--zookeeper") + 1] == "127.0.0.1:2281"
    assert plan_cluster(Options(auditors=0), root=Path("/d"), zookeeper_command=fake_zookeeper).auditors == ()
    with pytest.raises(StandaloneError, match="both use port 8090"):
        plan_cluster(Options(brokers=11), root=Path("/d"), zookeeper_command=fake_zookeeper)


def test_an_existing_zookeeper_replaces_the_embedded_one() -> None:
    plan = plan_cluster(Options(zookeeper="zk:2181"), root=Path("/d"), zookeeper_command=fake_zookeeper)
    assert plan.zookeepers == ()
    assert all("zk:2181" in process.command for process in plan.processes)


def test_every_zookeeper_gets_the_whole_ensemble() -> None:
    seen: list[object] = []

    def command(server: ServerSpec, ensemble: object) -> list[str]:
        seen.append(ensemble)
        return ["zk"]

    plan = plan_cluster(Options(zookeepers=3), root=Path("/d"), zookeeper_command=command)
    assert plan.zookeeper_servers == "127.0.0.1:2181,127.0.0.1:2182,127.0.0.1:2183"
    assert [dict(z.ports) for z in plan.zookeepers][2] == {"clients": 2183, "peers": 2890, "election": 3890}
    assert all(len(ensemble) == 3 for ensemble in seen)  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [-9000, 64000])
def test_ports_out_of_range_are_refused(offset: int) -> None:
    with pytest.raises(StandaloneError, match="--port-offset"):
        plan_cluster(Options(port_offset=offset), root=Path("/d"), zookeeper_command=fake_zookeeper)


@pytest.mark.parametrize("count", [-1, 65, 10**9])
def test_counts_out_of_range_are_refused(count: int) -> None:
    with pytest.raises(BadRequest, match="--bookies"):
        Options(bookies=count)


def test_services_connect_to_zookeeper_as_the_command_does() -> None:
    access = AccessFiles(ca_file="/ca.pem", credentials_file="/credentials", new_nodes=NewNodes.CREATOR)
    options = Options(zookeeper="zk:2281")
    plan = plan_cluster(options, root=Path("/d"), zookeeper_command=fake_zookeeper, access=access)
    for process in (*plan.bookies, *plan.brokers, *plan.auditors):
        flags = [word for word in process.command if word.startswith("--zookeeper-access")]
        assert flags == [
            "--zookeeper-access-ca-file",
            "--zookeeper-access-credentials-file",
            "--zookeeper-access-new-nodes",
        ]
        assert process.command[process.command.index(flags[2]) + 1] == "creator"
    without = plan_cluster(options, root=Path("/d"), zookeeper_command=fake_zookeeper)
    assert not any("--zookeeper-access" in word for process in without.processes for word in process.command)


def test_tls_needs_a_zookeeper_that_has_it() -> None:
    with pytest.raises(StandaloneError, match="BINDERY_ZOOKEEPER_CA_FILE"):
        plan_cluster(
            Options(), root=Path("/d"), zookeeper_command=fake_zookeeper, access=AccessFiles(ca_file="/ca.pem")
        )
