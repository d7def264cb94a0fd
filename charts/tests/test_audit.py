"""The audit's CronJob: schedule, result of a Job, permissions, and executors."""

import json
from typing import Any

import pytest
import yaml
from bindery_spark.session import JVM_OPTIONS
from rendering import (
    CHART,
    Object,
    environment,
    helm,
    helm_program,
    main_container,
    named,
    of_kind,
    quantity,
    refusal,
    render,
    render_preset,
)

ON = {"audit.enabled": True}
EXECUTORS = {**ON, "audit.executors.enabled": True}
CONFIG = "/etc/bindery/spark"


def cronjob(values: Object, name: str = "bindery-audit", *, preset: str = "none") -> Any:
    return named(render({**ON, **values}, preset=preset), "CronJob", name)["spec"]


def pod(values: Object, **others: str) -> Any:
    return cronjob(values, **others)["jobTemplate"]["spec"]["template"]


def spark_conf(values: Object) -> Any:
    return json.loads(environment(pod(values))["BINDERY_SPARK_CONF"])


def executor(values: Object | None = None, *, preset: str = "none") -> Any:
    made = named(render({**EXECUTORS, **(values or {})}, preset=preset), "ConfigMap", "bindery-audit-executors")
    return yaml.safe_load(made["data"]["executor.yaml"])


def test_audit_objects_are_not_created_by_default() -> None:
    assert not [one for one in render_preset("none") if "audit" in one["metadata"]["name"].split("-")]


def test_audits_run_one_at_a_time_by_a_schedule() -> None:
    spec = cronjob({"audit.schedule": "15 3 * * *", "audit.timeZone": "Europe/Berlin", "audit.suspend": True})
    assert (spec["schedule"], spec["timeZone"], spec["suspend"]) == ("15 3 * * *", "Europe/Berlin", True)
    assert spec["concurrencyPolicy"] == "Forbid"
    plain = cronjob({})
    assert "timeZone" not in plain
    assert plain["suspend"] is False
    assert (plain["successfulJobsHistoryLimit"], plain["failedJobsHistoryLimit"]) == (3, 3)
    assert plain["startingDeadlineSeconds"] == 3600


def test_a_verdict_ends_the_job_and_another_failure_does_not() -> None:
    job = cronjob({"audit.backoffLimit": 5, "audit.activeDeadlineSeconds": 600})["jobTemplate"]["spec"]
    found, evicted = job["podFailurePolicy"]["rules"]
    assert found == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "audit", "operator": "In", "values": [1, 2, 3]},
    }
    assert evicted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert (job["backoffLimit"], job["activeDeadlineSeconds"]) == (5, 600)
    assert job["template"]["spec"]["restartPolicy"] == "Never", "Kubernetes takes a policy with nothing else"
    assert job["template"]["spec"]["containers"][0]["name"] == "audit"


def test_the_arguments_of_the_audit_follow_the_values() -> None:
    values = {
        "audit.level": "quick", "audit.sinceVerified": "7d", "audit.rate": "1MiB/s", "audit.cores": 3,
        "audit.apply": True, "audit.extraArgs": ["--open-max=14d"], "audit.keepRuns": 4,
    }  # fmt: skip
    assert main_container(pod(values))["args"] == [
        "scheduled", "--level=quick", "--rate=1MiB/s", "--cores=3", "--since-verified=7d", "--apply", "--yes",
        "--open-max=14d",
    ]  # fmt: skip
    assert main_container(pod({}))["args"] == ["scheduled", "--level=deep", "--rate=20MiB/s", "--cores=2"]
    assert environment(pod(values))["BINDERY_AUDIT_KEEP"] == "4"


def test_every_pod_of_a_job_has_the_uid_of_the_job() -> None:
    (variable,) = [one for one in main_container(pod({}))["env"] if one["name"] == "BINDERY_AUDIT_JOB"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['batch.kubernetes.io/controller-uid']"


def test_runs_are_on_a_claim_that_outlives_the_release() -> None:
    objects = render({**ON, "audit.persistence.size": "9Gi", "audit.persistence.storageClass": "slow"})
    claim = named(objects, "PersistentVolumeClaim", "bindery-audit")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["resources"]["requests"]["storage"] == "9Gi"
    assert claim["spec"]["storageClassName"] == "slow"
    template = pod({})
    assert {"name": "audits", "persistentVolumeClaim": {"claimName": "bindery-audit"}} in template["spec"]["volumes"]
    out = environment(template)["BINDERY_AUDIT_OUT"]
    assert {"name": "audits", "mountPath": out} in main_container(template)["volumeMounts"]


def test_an_existing_claim_is_used_and_none_is_created() -> None:
    objects = render({**ON, "audit.persistence.existingClaim": "mine"})
    assert of_kind(objects, "PersistentVolumeClaim") == []
    volumes = pod({"audit.persistence.existingClaim": "mine"})["spec"]["volumes"]
    assert {"name": "audits", "persistentVolumeClaim": {"claimName": "mine"}} in volumes


def test_without_a_claim_runs_are_in_the_pod_and_no_pod_can_read_them_later() -> None:
    objects = render({**ON, "audit.persistence.enabled": False})
    assert of_kind(objects, "PersistentVolumeClaim") == []
    assert [one["metadata"]["name"] for one in of_kind(objects, "CronJob")] == ["bindery-audit"]
    volumes = named(objects, "CronJob", "bindery-audit")["spec"]["jobTemplate"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "audits", "emptyDir": {"sizeLimit": "2Gi"}} in volumes


def test_a_pod_for_the_reports_is_only_created_on_request_and_ends_by_itself() -> None:
    spec = cronjob({}, "bindery-audit-reports")
    assert spec["suspend"] is True
    job = spec["jobTemplate"]["spec"]
    assert job["activeDeadlineSeconds"] <= 3700
    assert "audits" in {mount["name"] for mount in main_container(job["template"])["volumeMounts"]}


def test_a_job_binds_the_claim_where_storage_waits_for_a_pod() -> None:
    """`helm install --wait` waits for claims, and the first audit may run a week later."""
    (job,) = [one for one in of_kind(render(ON), "Job") if "-audit-volume-" in one["metadata"]["name"]]
    claims = [volume.get("persistentVolumeClaim") for volume in job["spec"]["template"]["spec"]["volumes"]]
    assert {"claimName": "bindery-audit"} in claims
    assert main_container(job["spec"]["template"])["args"] == ["show"]


def test_a_driver_without_executors_has_no_role_and_no_token() -> None:
    objects = render(ON)
    assert of_kind(objects, "Role", "RoleBinding") == []
    assert pod({})["spec"]["automountServiceAccountToken"] is False
    assert spark_conf({}) == {"spark.driver.memory": "640m"}


def test_with_executors_the_driver_may_only_manage_pods_of_its_namespace() -> None:
    objects = render(EXECUTORS)
    (rule,) = named(objects, "Role", "bindery-audit")["rules"]
    assert (rule["apiGroups"], rule["resources"]) == ([""], ["pods"])
    assert rule["verbs"] == ["create", "get", "list", "watch", "delete", "deletecollection"], "no pod can be changed"
    binding = named(objects, "RoleBinding", "bindery-audit")
    assert binding["roleRef"]["kind"] == "Role"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "bindery-audit", "namespace": "somewhere"}]
    assert pod(EXECUTORS)["spec"]["automountServiceAccountToken"] is True
    for name in ("bindery-audit-reports",):
        assert pod(EXECUTORS, name=name)["spec"]["automountServiceAccountToken"] is False


def test_executors_have_an_account_of_their_own_without_permissions_and_without_a_token() -> None:
    objects = render({**EXECUTORS, "defaults.automountServiceAccountToken": True})
    account = named(objects, "ServiceAccount", "bindery-audit-executor")
    assert account["automountServiceAccountToken"] is False
    bound = [one["name"] for binding in of_kind(objects, "RoleBinding") for one in binding["subjects"]]
    assert bound == ["bindery-audit"]
    assert (
        spark_conf(EXECUTORS)["spark.kubernetes.authenticate.executor.serviceAccountName"] == "bindery-audit-executor"
    )
    assert executor({"audit.automountServiceAccountToken": True})["spec"]["automountServiceAccountToken"] is False
    assert "bindery-audit-executor" not in [one["metadata"]["name"] for one in of_kind(render(ON), "ServiceAccount")]


@pytest.mark.parametrize("of_driver", [{}, {"audit.serviceAccount": {"create": False, "name": "mine"}}], ids=str)
def test_the_account_of_executors_can_be_an_existing_one(of_driver: Object) -> None:
    own: Object = {**of_driver, "audit.executors.serviceAccount": {"create": False, "name": "weak"}}
    assert executor(own)["spec"]["serviceAccountName"] == "weak"
    assert spark_conf({**EXECUTORS, **own})["spark.kubernetes.authenticate.executor.serviceAccountName"] == "weak"
    accounts = [one["metadata"]["name"] for one in of_kind(render({**EXECUTORS, **own}), "ServiceAccount")]
    assert "weak" not in accounts
    assert "bindery-audit-executor" not in accounts
    annotated = render({**EXECUTORS, "audit.executors.serviceAccount": {"annotations": {"a": "b"}}})
    assert named(annotated, "ServiceAccount", "bindery-audit-executor")["metadata"]["annotations"] == {"a": "b"}


@pytest.mark.parametrize(
    "values",
    [
        {"audit.serviceAccount": {"create": False, "name": "one"}, "audit.executors.serviceAccount": {"create": False,
         "name": "one"}},
        {"audit.executors.serviceAccount": {"create": False, "name": "bindery-audit"}},
        {"defaults.serviceAccount": {"create": False, "name": "one"}},
    ],
    ids=("named", "created", "by default"),
)  # fmt: skip
def test_executors_with_the_account_of_the_driver_are_refused(values: Object) -> None:
    said = refusal({**EXECUTORS, **values})
    assert "which may create pods because it is the driver's: set audit.executors.serviceAccount.name" in said


def test_no_object_is_cluster_wide_unless_the_policy_is_wanted() -> None:
    for objects in (render(EXECUTORS), render_preset("none"), render_preset("restricted")):
        assert all(one["metadata"].get("namespace") == "somewhere" for one in objects)
    values = {**EXECUTORS, "audit.executors.admissionPolicy.enabled": True}
    wide = [one for one in render(values) if "namespace" not in one["metadata"]]
    assert {one["kind"] for one in wide} == {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    assert {one["metadata"]["name"] for one in wide} == {"somewhere-bindery-audit-executors"}
    for off in ({"audit.enabled": False}, {"audit.executors.enabled": False}):
        assert not of_kind(render({**values, **off}), "ValidatingAdmissionPolicy")


def test_the_policy_allows_what_the_template_of_executors_has() -> None:
    """`test_admission` has what Kubernetes makes of it."""
    values = {
        **EXECUTORS,
        "audit.executors.admissionPolicy.enabled": True,
        "audit.extraVolumes": [{"name": "a", "secret": {"secretName": "access"}},
                               {"name": "b", "configMap": {"name": "m"}}, {"name": "c", "emptyDir": {}}],
        "audit.extraVolumeMounts": [{"name": "a", "mountPath": "/a"}],
        "audit.env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "variables", "key": "a"}}}],
        "audit.extraEnvFrom": [{"secretRef": {"name": "more"}}],
        "audit.sidecars": [{"name": "s", "image": "side:1"}],
        "audit.serviceAccount": {"create": False, "name": "mine"},
    }  # fmt: skip
    policy = of_kind(render(values), "ValidatingAdmissionPolicy")[0]["spec"]
    (condition,) = policy["matchConditions"]
    assert condition["expression"] == 'request.userInfo.username == "system:serviceaccount:somewhere:mine"'
    assert policy["failurePolicy"] == "Fail"
    rules = " ".join(" ".join(one["expression"].split()) for one in policy["validations"])
    for part in (
        'volume.secret.secretName in ["access"]', 'volume.configMap.name in ["m"]',
        'volume.persistentVolumeClaim.claimName in ["bindery-audit"]', 'it.secretRef.name in ["variables","more"]',
        'it.valueFrom.secretKeyRef.name in ["variables","more"]', 'one.image in ["bindery/spark:0.1.0","side:1"]',
        'object.spec.serviceAccountName == "bindery-audit-executor"',
    ):  # fmt: skip
        assert part in rules, part


def test_a_policy_that_cannot_work_is_refused() -> None:
    values: Object = {**EXECUTORS, "audit.executors.admissionPolicy.enabled": True}
    odd = [{"name": "odd", "projected": {"sources": []}}]
    assert 'the volume "odd" of audit.extraVolumes is neither a secret' in refusal(
        {**values, "audit.extraVolumes": odd}
    )
    options = [word for key, value in values.items() for word in ("--set-json", f"{key}={json.dumps(value)}")]
    done = helm("template", "bindery", str(CHART), "--kube-version=1.29.9", *options)
    assert "audit.executors.admissionPolicy.enabled needs Kubernetes 1.30, and this is v1.29.9" in done.stderr


def test_sizes_of_executors_become_settings_of_spark() -> None:
    conf = spark_conf(
        {
            **EXECUTORS,
            "audit.executors.instances": 3,
            "audit.executors.cores": 2,
            "audit.executors.heapSize": "1Gi",
            "audit.executors.memoryOverhead": "512Mi",
            "audit.executors.requestCpu": "1500m",
            "audit.heapSize": "768Mi",
            "global.imageRegistry": "registry.example",
            "audit.image.pullPolicy": "Always",
        }
    )
    wanted = {
        "spark.driver.memory": "768m",
        "spark.executor.instances": "3",
        "spark.executor.cores": "2",
        "spark.executor.memory": "1024m",
        "spark.executor.memoryOverhead": "512m",
        "spark.kubernetes.executor.request.cores": "1500m",
        "spark.kubernetes.namespace": "somewhere",
        "spark.kubernetes.container.image": "registry.example/bindery/spark:0.1.0",
        "spark.kubernetes.container.image.pullPolicy": "Always",
    }
    assert wanted.items() <= conf.items()


def test_executors_connect_to_the_drivers_pod_and_authenticate() -> None:
    conf = spark_conf(EXECUTORS)
    assert (conf["spark.driver.host"], conf["spark.driver.port"]) == ("$(POD_IP)", "7078")
    assert (conf["spark.authenticate"], conf["spark.network.crypto.enabled"]) == ("true", "true")
    names = [one["name"] for one in main_container(pod(EXECUTORS))["env"]]
    assert names.index("POD_IP") < names.index("BINDERY_SPARK_CONF") > names.index("POD_NAME")
    assert conf["spark.kubernetes.driver.pod.name"] == "$(POD_NAME)", "with it executors go when the driver goes"


def test_executors_run_java_as_the_driver_does() -> None:
    assert spark_conf(EXECUTORS)["spark.executor.extraJavaOptions"] == JVM_OPTIONS


def test_settings_of_the_operator_override_those_of_the_chart() -> None:
    conf = spark_conf({**EXECUTORS, "audit.sparkConf": {"spark.driver.memory": "2g", "spark.task.cpus": "1"}})
    assert (conf["spark.driver.memory"], conf["spark.task.cpus"]) == ("2g", "1")


def test_executors_comply_with_the_level_restricted_and_mount_the_runs() -> None:
    spec = executor()["spec"]
    (container,) = spec["containers"]
    assert container["resources"] == {"limits": {"ephemeral-storage": "4Gi"}}, "Spark adds CPU and memory"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == "bindery-audit-executor"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    template = pod(EXECUTORS)
    assert f"{CONFIG}/executor.yaml" == spark_conf(EXECUTORS)["spark.kubernetes.executor.podTemplateFile"]
    assert {"name": "executors", "mountPath": CONFIG, "readOnly": True} in main_container(template)["volumeMounts"]
    assert {"name": "executors", "configMap": {"name": "bindery-audit-executors"}} in template["spec"]["volumes"]


def test_executors_run_on_the_node_of_a_volume_that_only_one_node_can_mount() -> None:
    (term,) = executor()["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "audit"
    anywhere = executor({"audit.persistence.accessModes": ["ReadWriteMany"]})
    assert "podAffinity" not in anywhere["spec"]["affinity"]


def test_executors_of_one_node_have_no_anti_affinity() -> None:
    together = executor({"audit.zoneSpread": "hard"}, preset="ha")["spec"]
    assert set(together["affinity"]) == {"podAffinity"}
    assert "topologySpreadConstraints" not in together
    apart = executor({"audit.persistence.accessModes": ["ReadWriteMany"]}, preset="ha")["spec"]
    assert set(apart["affinity"]) == {"podAntiAffinity"}
    assert "topologySpreadConstraints" in apart
    own = executor({"audit.affinity": {"nodeAffinity": {"x": []}}})["spec"]["affinity"]
    assert set(own) == {"nodeAffinity", "podAffinity"}, "what the operator says stays"


def test_a_limit_on_cpu_and_scratch_space_applies_to_executors() -> None:
    """A quota on limits refuses every pod without a limit."""
    conf = json.loads(environment(pod(EXECUTORS, preset="restricted"))["BINDERY_SPARK_CONF"])
    assert conf["spark.kubernetes.executor.limit.cores"] == "500m"
    (container,) = executor(preset="restricted")["spec"]["containers"]
    assert container["resources"] == {"requests": {"ephemeral-storage": "64Mi"}, "limits": {"ephemeral-storage": "4Gi"}}
    assert "spark.kubernetes.executor.limit.cores" not in spark_conf(EXECUTORS), "no limit by default"


def test_values_of_the_audit_apply_to_its_executors() -> None:
    spec = executor({"audit.nodeSelector": {"disk": "fast"}, "audit.env": [{"name": "EXTRA", "value": "1"}]})["spec"]
    assert spec["nodeSelector"] == {"disk": "fast"}
    assert {"name": "EXTRA", "value": "1"} in spec["containers"][0]["env"]


def test_policies_let_only_executors_reach_the_driver() -> None:
    objects = render({**EXECUTORS, "networkPolicy.enabled": True})
    (driver,) = named(objects, "NetworkPolicy", "bindery-audit")["spec"]["ingress"]
    (blocks,) = named(objects, "NetworkPolicy", "bindery-audit-executor")["spec"]["ingress"]
    assert [port["port"] for port in driver["ports"]] == [7078, 7079]
    assert [port["port"] for port in blocks["ports"]] == [7079]
    for rule in (driver, blocks):
        (peer,) = rule["from"]
        (expression,) = peer["podSelector"]["matchExpressions"]
        assert set(expression["values"]) == {"audit", "audit-executor"}
    alone = render({**ON, "networkPolicy.enabled": True})
    assert named(alone, "NetworkPolicy", "bindery-audit")["spec"]["ingress"] == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"audit.heapSize": "256Mi"}, "audit.heapSize (256Mi) is less than Spark requires: set it to 512Mi"),
        ({"audit.executors.heapSize": "64Mi"}, "audit.executors.heapSize (64Mi) is less than Spark requires"),
        ({"audit.heapSize": "1400Mi"}, "leaves Java and Python no room within audit.resources.limits.memory"),
        ({"audit.executors.enabled": True, "audit.persistence.enabled": False}, "share the run's files by the claim"),
        (
            {"audit.executors.enabled": True, "audit.serviceAccount.create": False},
            "audit.serviceAccount.name is empty",
        ),
        (
            {
                "audit.executors.enabled": True,
                "audit.resources.limits.cpu": "0.5",
                "audit.executors.requestCpu": "501m",
            },
            "audit.executors.requestCpu (501m) is above audit.resources.limits.cpu (0.5)",
        ),
        ({"fullnameOverride": "n" * 39}, "with audit.enabled that must be 38 characters at most"),
        ({"audit.image.repository": ""}, "audit.image.repository is empty: set it to bindery/spark"),
        ({"audit.level": "shallow"}, "level"),
        ({"audit.keepRuns": 1}, "keepRuns"),
        ({"audit.overdueAfterSeconds": 0}, "overdueAfterSeconds"),
        ({"audit.schedule": "daily"}, "schedule"),
        ({"audit.rate": "fast"}, "rate"),
        ({"audit.sparkConf": {"spark.driver.port": 7078}}, "sparkConf"),
        ({"audit.extraArgs": ["; rm"]}, "extraArgs"),
        ({"audit.executors.instances": 0}, "instances"),
        ({"audit.schedul": "@daily"}, "schedul"),
    ],
)
def test_values_that_cannot_work_are_refused(values: Object, words: str) -> None:
    assert words in refusal({**ON, **values})


def test_names_of_cron_jobs_leave_room_for_the_suffix_of_kubernetes() -> None:
    objects = of_kind(render({**ON, "fullnameOverride": "n" * 38}), "CronJob")
    assert max(len(one["metadata"]["name"]) for one in objects) == 52


def test_without_a_volume_the_general_limit_of_names_applies() -> None:
    (one,) = of_kind(render({**ON, "fullnameOverride": "n" * 40, "audit.persistence.enabled": False}), "CronJob")
    assert one["metadata"]["name"] == "n" * 40 + "-audit"


def test_an_existing_account_may_create_the_executors() -> None:
    objects = render({**EXECUTORS, "audit.serviceAccount": {"create": False, "name": "mine"}})
    assert [one["name"] for one in named(objects, "RoleBinding", "bindery-audit")["subjects"]] == ["mine"]


def test_the_restricted_preset_has_space_for_scratch_files() -> None:
    limits = main_container(pod({}, preset="restricted"))["resources"]["limits"]
    assert quantity(limits["ephemeral-storage"]) >= quantity("2Gi")
    assert "cpu" in limits


def test_helm_lint_reports_nothing() -> None:
    import subprocess

    done = subprocess.run(
        [helm_program(), "lint", str(CHART), "--strict", "--kube-version=1.34.0", "--set",
         "audit.enabled=true,audit.executors.enabled=true"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout
