"""The plan and the secrets of `bindery standalone --secure`, without processes."""

import time
from pathlib import Path
from typing import Any

import pytest
from bindery.standalone.directory import DataDirectory
from bindery.standalone.options import Options
from bindery.standalone.plan import ClusterPlan, Kind, plan_cluster
from bindery.standalone.secured import Secured, access_of, has_open_metadata, is_secured
from bindery.standalone.supervisor import welcome
from bindery_auditor.settings import AuditorSettings
from bindery_bookie.settings import BookieSettings
from bindery_broker.settings import BrokerSettings
from bindery_core.errors import BadRequest
from bindery_kit.configuration.settings import load
from bindery_metadata.stores.access_lists import NewNodes
from bindery_metadata.stores.embedded import ServerSpec, server_config
from bindery_metadata.stores.zookeeper_access import NO_ACCESS, AccessFiles
from command import bindery
from recipe import Recipe


def planned(root: Path, servers: list[ServerSpec]) -> ClusterPlan:
    def command(server: ServerSpec, ensemble: object) -> list[str]:
        servers.append(server)
        return ["zookeeper"]

    secured = Secured(root)
    return plan_cluster(
        Options(bookies=3, port_offset=100, secure=True),
        root=root,
        zookeeper_command=command,
        access=secured.access(),
        secured=secured,
    )


def test_every_port_of_the_plan_has_tls_and_every_service_accepts_its_settings(tmp_path: Path) -> None:
    servers: list[ServerSpec] = []
    plan = planned(tmp_path, servers)
    assert all(process.ca_file for process in plan.processes)
    assert (plan.broker_urls, plan.auditor_urls) == (["https://127.0.0.1:8180"], ["https://127.0.0.1:8190"])
    assert plan.zookeeper_servers == "127.0.0.1:2281"
    lines = server_config(servers[0]).splitlines()
    assert "secureClientPort=2281" in lines
    assert not [line for line in lines if line.startswith("clientPort")]
    for process in (*plan.bookies, *plan.brokers, *plan.auditors):
        argv = process.command[3:]
        if process.kind is Kind.BOOKIE:
            bookie = load(BookieSettings, argv, prog="bindery-bookie")
            assert (bookie.tls.required, bookie.http.tls.is_set, bookie.auth.provider) == (True, True, "token")
            of_zookeeper, audit = bookie.zookeeper_access, bookie.audit_log
        elif process.kind is Kind.BROKER:
            broker = load(BrokerSettings, argv, prog="bindery-broker")
            assert (broker.http.tls.is_set, broker.authorization.enabled) == (True, True)
            assert not broker.auth.admits_everybody
            of_zookeeper, audit = broker.zookeeper_access, broker.audit_log
        else:
            auditor = load(AuditorSettings, argv, prog="bindery-auditor")
            assert (auditor.http.tls.is_set, auditor.admin.is_set) == (True, True)
            of_zookeeper, audit = auditor.zookeeper_access, auditor.audit_log
        assert of_zookeeper.new_nodes is NewNodes.CREATOR
        assert of_zookeeper.ca_file
        assert audit.file


def test_the_secrets_survive_a_restart_and_neither_commands_nor_output_contain_one(tmp_path: Path) -> None:
    plan = planned(tmp_path, [])
    secured = Secured(tmp_path)
    where = {"url": plan.broker_urls[0], "zookeeper": plan.zookeeper_servers, "access": plan.access}
    secured.create(now_s=time.time(), **where)  # type: ignore[arg-type]
    first = {path.name: path.read_bytes() for path in (tmp_path / "secrets").iterdir()}
    secured.create(now_s=time.time(), **where)  # type: ignore[arg-type]
    assert {path.name: path.read_bytes() for path in (tmp_path / "secrets").iterdir()} == first
    token = first["admin.token"].decode().strip()
    assert first["admin.header"].decode() == f"Authorization: Bearer {token}\n"
    password = first["zookeeper.credentials"].decode().strip().partition(":")[2]
    shown = "\n".join([*welcome(plan, DataDirectory(tmp_path)), *(" ".join(p.command) for p in plan.processes)])
    for secret in (token, password, first["environment"].decode()):
        assert secret not in shown
    assert f". {tmp_path}/secrets/environment" in shown
    assert token not in first["environment"].decode()


def test_a_renewed_token_is_also_in_the_file_for_curl(tmp_path: Path) -> None:
    plan = planned(tmp_path, [])
    where = {"url": "", "zookeeper": "", "access": plan.access}
    for now_s in (time.time() - 300 * 86_400, time.time()):
        Secured(tmp_path).create(now_s=now_s, **where)  # type: ignore[arg-type]
        token = (tmp_path / "secrets" / "admin.token").read_text()
        assert (tmp_path / "secrets" / "admin.header").read_text() == f"Authorization: Bearer {token}"


def test_the_environment_of_commands_is_what_they_read(tmp_path: Path) -> None:
    access = Secured(tmp_path).access()
    assert AccessFiles.of(access.variables()) == access
    variables = Secured(tmp_path).variables(url="https://127.0.0.1:8080", zookeeper="127.0.0.1:2181", access=access)
    assert {"BINDERY_URL", "BINDERY_TOKEN_FILE", "BINDERY_HTTP_CA_FILE", "BINDERY_CLIENT_CA_FILE"} <= set(variables)


def test_another_zookeeper_needs_credentials_of_its_own(tmp_path: Path) -> None:
    secured = Secured(tmp_path)
    with pytest.raises(BadRequest, match="BINDERY_ZOOKEEPER_CREDENTIALS_FILE"):
        access_of(secured, NO_ACCESS, zookeeper="zk:2181")
    theirs = AccessFiles(credentials_file="/c", new_nodes=NewNodes.CREATOR)
    assert access_of(secured, theirs, zookeeper="zk:2181") is theirs
    assert access_of(secured, theirs, zookeeper=None) == secured.access()
    assert access_of(None, theirs, zookeeper=None) is theirs
    with pytest.raises(BadRequest, match="one ZooKeeper"):
        Options(secure=True, zookeepers=3)


def test_a_cluster_is_started_only_as_it_was_made(tmp_path: Path) -> None:
    secure, not_secure = tmp_path / "a", tmp_path / "b"
    (secure / "secrets").mkdir(parents=True)
    (not_secure / "zookeeper-0").mkdir(parents=True)
    assert (is_secured(secure), has_open_metadata(secure)) == (True, False)
    assert (is_secured(not_secure), has_open_metadata(not_secure)) == (False, True)
    refused = bindery("standalone", "--data", str(secure))
    assert refused.returncode == 1
    assert f"standalone --secure --data {secure}" in refused.stderr
    refused = bindery("standalone", "--secure", "--data", str(not_secure))
    assert refused.returncode == 1
    assert "made without --secure" in refused.stderr


def test_the_services_accept_the_settings_of_the_recipe() -> None:
    kinds = {Kind.BOOKIE: BookieSettings, Kind.AUDITOR: AuditorSettings, Kind.BROKER: BrokerSettings}
    for kind, flags in Recipe.of_page().settings.items():
        argv = [word for words in flags.values() for word in words]
        settings: Any = load(kinds[kind], argv, prog=f"bindery-{kind}")
        assert settings.http.tls.is_set
        assert settings.zookeeper_access.new_nodes is NewNodes.CREATOR
