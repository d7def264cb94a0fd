"""The jobs that back up and restore the metadata."""

import pytest
from rendering import (
    Object,
    by_component,
    environment,
    main_container,
    named,
    of_kind,
    pod_templates,
    refusal,
    render,
    render_preset,
)

ON = {"backup.enabled": True}
NAMES = ("bindery-backup", "bindery-restore", "bindery-backups")


def template_of(objects: list[Object], name: str) -> Object:
    return dict(next(template for found, template in pod_templates(objects) if found == name))


def test_there_is_no_backup_by_default_and_one_in_production() -> None:
    assert of_kind(render_preset("none"), "CronJob") == []
    assert {one["metadata"]["name"] for one in of_kind(render_preset("ha"), "CronJob")} == set(NAMES)


def test_the_schedule_starts_backups_and_nothing_starts_the_other_jobs() -> None:
    values = {"schedule": "0 * * * *", "timeZone": "Europe/Berlin", "keep": 7, "activeDeadlineSeconds": 600}
    objects = render({**ON, **{f"backup.{key}": value for key, value in values.items()}})
    backup, restore, look = (named(objects, "CronJob", name)["spec"] for name in NAMES)
    assert (backup["schedule"], backup["timeZone"], backup["suspend"]) == ("0 * * * *", "Europe/Berlin", False)
    assert (backup["concurrencyPolicy"], restore["suspend"], look["suspend"]) == ("Forbid", True, True)
    assert backup["jobTemplate"]["spec"]["activeDeadlineSeconds"] == 600
    assert restore["jobTemplate"]["spec"]["backoffLimit"] == 0, "what was refused would be refused again"
    words = [main_container(template_of(objects, name)) for name in NAMES]
    assert words[0]["args"] == ["cluster", "backups", "create", "/backups", "--keep=7"]
    assert words[1]["args"] == ["cluster", "backups", "restore", "/backups"]
    assert words[2]["command"] == ["sleep", "3600"]


def test_the_claim_is_kept_and_bound_by_a_first_pod() -> None:
    objects = render({**ON, "backup.persistence.storageClass": "other-disks", "backup.persistence.size": "3Gi"})
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["storageClassName"] == "other-disks"
    assert claim["spec"]["resources"]["requests"]["storage"] == "3Gi"
    first = [name for name, _ in pod_templates(objects) if name.startswith("bindery-backup-volume-")]
    for name in (*NAMES, *first):
        volumes = template_of(objects, name)["spec"]["volumes"]
        assert {"name": "backups", "persistentVolumeClaim": {"claimName": "bindery-backup"}} in volumes, name
    assert len(first) == 1
    mine = render({**ON, "backup.persistence.existingClaim": "mine"})
    assert of_kind(mine, "PersistentVolumeClaim") == []
    assert "'claimName': 'mine'" in str(template_of(mine, "bindery-restore"))


def test_without_a_volume_backups_are_only_sent_to_the_store() -> None:
    none = {**ON, "backup.persistence.enabled": False}
    assert "every backup would be deleted with its pod" in refusal(none)
    objects = render({**none, "backup.upload.secretName": "store"})
    assert {one["metadata"]["name"] for one in of_kind(objects, "CronJob")} == {"bindery-backup"}
    template = template_of(objects, "bindery-backup")
    container = main_container(template)
    assert container["args"][-1] == "--upload=/etc/bindery/upload"
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert volumes["upload"]["secret"] == {"secretName": "store", "defaultMode": 0o440}
    assert "emptyDir" in volumes["backups"]
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)


def test_backups_use_the_security_of_the_cluster() -> None:
    objects = render(ON, preset="tls-auth")
    for name in NAMES:
        template = template_of(objects, name)
        found = environment(template)
        assert found["BINDERY_ZOOKEEPER_CREDENTIALS_FILE"] == "/etc/bindery/secure/zookeeper", name
        assert found["BINDERY_ZOOKEEPER_NEW_NODES"] == "creator", "restored nodes are protected"
        assert "secure" in {volume["name"] for volume in template["spec"]["volumes"]}, name
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["automountServiceAccountToken"] is False
    policy = named(objects, "NetworkPolicy", "bindery-backup")["spec"]
    assert policy["ingress"] == []
    ports = [port["port"] for rule in policy["egress"] for port in rule["ports"]]
    assert sorted(ports) == [53, 53, 2181]


def test_the_image_is_that_of_the_toolbox_and_the_account_its_own() -> None:
    objects = render({**ON, "toolbox.image.tag": "9"})
    template = by_component(objects)["backup"]
    assert main_container(template)["image"] == "bindery/toolbox:9"
    assert template["spec"]["serviceAccountName"] == "bindery-backup"
    assert named(objects, "ServiceAccount", "bindery-backup")


@pytest.mark.parametrize(
    ("key", "value"),
    [("schedule", "hourly"), ("keep", 0), ("overdueAfterSeconds", 1), ("upload", {"url": "https://a"})],
)
def test_wrong_values_are_refused(key: str, value: object) -> None:
    assert f"at '/backup/{key}" in refusal({**ON, f"backup.{key}": value})
