"""Generate charts/bindery/values.schema.json from values.yaml (names, types, comments), the services' settings and
SHAPES.

Helm refuses keys that are missing in values.yaml, so the three always agree. `config` accepts the services' settings: a
new setting of a service becomes a value of the chart when this script runs.

    python tools/chart_schema.py            write the file
    python tools/chart_schema.py --check    exit code 1 if the file is out of date
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import yaml
from bindery_auditor.settings import AuditorSettings
from bindery_bookie.autorecovery.embedded_settings import EmbeddedRecoverySettings
from bindery_bookie.settings import BookieSettings
from bindery_broker.settings import BrokerSettings
from bindery_kit.configuration.setting_values import SecretStr
from bindery_kit.configuration.settings import SettingField, Settings, descriptions

CHART: Final = Path(__file__).resolve().parent.parent / "charts/bindery"
SCHEMA: Final = CHART / "values.schema.json"
WIDTH: Final = 140

Schema = dict[str, Any]

WORKLOADS: Final = (
    "zookeeper",
    "bookie",
    "broker",
    "auditor",
    "toolbox",
    "audit",
    "backup",
    "init",
    "secretsJob",
    "upgradeGate",
    "helmTest",
)
"""Blocks that may have all keys of `defaults`."""

SERVICES: Final[Mapping[str, tuple[type[Settings], Mapping[str, type[Settings]]]]] = {
    "bookie": (BookieSettings, {"recovery": EmbeddedRecoverySettings}),
    "broker": (BrokerSettings, {}),
    "auditor": (AuditorSettings, {}),
}
"""Settings of a workload's `config`, and further groups that are read from the environment."""

BY_CHART: Final = frozenset(
    {
        *("zookeeper", "ledgers_root", "host", "port", "http_port", "insecure"),
        *("bookie_id", "name", "advertised_host", "advertised_url"),
        *("journal_dir", "ledger_dir", "journal_directory", "ledger_directory"),
    }
)
"""Settings that the chart sets itself: addresses, identities, paths of volumes."""

QUANTITY: Final = {"type": ["string", "integer"], "pattern": "^[0-9]+(\\.[0-9]+)?([KMGT]i|[kMGT])?$", "minimum": 0}
RESOURCE: Final = {"type": ["string", "number"], "pattern": "^[0-9]+(\\.[0-9]+)?([munkMGTPE]|[KMGTPE]i|[eE][0-9]+)?$"}
"""Pattern of a Kubernetes quantity, including milli and exponents."""
AMOUNTS: Final = {"type": "object", "properties": {"memory": QUANTITY}, "additionalProperties": RESOURCE}
STRINGS: Final = {"type": "object", "additionalProperties": {"type": "string"}}
FREE: Final = {"type": "object"}
OBJECTS: Final = {"type": "array", "items": FREE}
COUNT: Final = {"type": "integer", "minimum": 1}
SERVER: Final = {"type": "string", "pattern": "^[^\\s,:/]+:[0-9]+$"}
PROBE: Final = {
    "type": "object",
    "properties": {
        "enabled": {"type": "boolean"},
        **dict.fromkeys(("httpGet", "tcpSocket", "exec", "grpc"), FREE),
        **{
            name: {"type": "integer", "minimum": 0}
            for name in (
                "initialDelaySeconds",
                "periodSeconds",
                "timeoutSeconds",
                "successThreshold",
                "failureThreshold",
                "terminationGracePeriodSeconds",
            )
        },
    },
    "additionalProperties": False,
}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def number_or_empty(*, least: int, most: int | None = None) -> Schema:
    bounds = {"minimum": least} if most is None else {"minimum": least, "maximum": most}
    return {"type": ["integer", "string"], "anyOf": [{"type": "integer", **bounds}, {"const": ""}]}


SHAPES: Final[Mapping[str, Schema]] = {
    "global": {"additionalProperties": True},  # shared with the charts that this one is a part of
    "imagePullSecrets": {"items": {"type": "object", "required": ["name"]}},
    "nameOverride": {"pattern": "^([a-z]([-a-z0-9]{0,38}[a-z0-9])?)?$"},
    "fullnameOverride": {"pattern": "^([a-z]([-a-z0-9]{0,38}[a-z0-9])?)?$"},
    "clusterDomain": {"minLength": 1},
    "*abels": STRINGS,
    "*nnotations": STRINGS,
    "*.nodeSelector": STRINGS,
    "*.image.digest": {"pattern": "^(sha256:[0-9a-f]{64})?$"},
    "*.image.tag": {"pattern": "^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$"},
    "*.image.pullPolicy": one_of("IfNotPresent", "Always", "Never"),
    "defaults.resources": {
        "type": "object",
        "properties": {
            "requests": AMOUNTS,
            "limits": AMOUNTS,
            "claims": OBJECTS,
        },
        "additionalProperties": False,
    },
    "*.antiAffinity": one_of("soft", "hard", "none"),
    "*.zoneSpread": one_of("soft", "hard", "none"),
    "*.dnsPolicy": one_of("", "ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "*.podSecurityContext": FREE,
    "*.containerSecurityContext": FREE,
    "*Probe": PROBE,
    "*.env": {"items": {"type": "object", "required": ["name"]}},
    "*.terminationGracePeriodSeconds": {"minimum": 0},
    "*.replicas": COUNT,
    "*.podManagementPolicy": one_of("Parallel", "OrderedReady"),
    "*.size": QUANTITY,
    "*.heapSize": QUANTITY,
    "*.medium": one_of("", "Memory"),
    "*.accessModes": {
        "items": one_of("ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"),
        "minItems": 1,
    },
    "*.whenDeleted": one_of("Retain", "Delete"),
    "*.whenScaled": one_of("Retain", "Delete"),
    "*.pdb.maxUnavailable": COUNT,
    "zookeeper.pdb.maxUnavailable": number_or_empty(least=1),
    "zookeeper.external.servers": {"items": SERVER},
    "zookeeper.chroot": {"pattern": "^((/[A-Za-z0-9_-][A-Za-z0-9._-]*)+)?$", "not": {"pattern": "^/zookeeper(/|$)"}},
    "extraManifests": {
        "items": {"anyOf": [{"type": "string"}, {"type": "object", "required": ["apiVersion", "kind", "metadata"]}]}
    },
    "zookeeper.config": {"additionalProperties": {"type": ["string", "integer", "boolean"]}},
    "zookeeper.logLevel": one_of("TRACE", "DEBUG", "INFO", "WARN", "ERROR"),
    "*.service.type": one_of("ClusterIP", "NodePort", "LoadBalancer"),
    "*.service.port": {"minimum": 1, "maximum": 65535},
    "*.service.nodePort": number_or_empty(least=1, most=65535),
    "*.service.externalTrafficPolicy": one_of("", "Cluster", "Local"),
    "*.loadBalancerSourceRanges": {"items": {"type": "string"}},
    "*.httpRoute.hosts": {"items": {"type": "string", "minLength": 1}},
    "*.httpRoute.parentRefs": {"items": {"type": "object", "required": ["name"]}},
    "*.httpRoute.timeouts.*": {"pattern": "^([0-9]{1,5}(h|m|s|ms)){0,4}$"},
    "*.minReadySeconds": {"minimum": 0},
    "*.ingress.hosts": {"items": {"type": "string", "minLength": 1}},
    "*.autoscaling.*Replicas": COUNT,
    "*.targetCPUUtilizationPercentage": {"minimum": 1, "maximum": 1000},
    "*.behavior": FREE,
    "*.ttlSecondsAfterFinished": {"minimum": 60},
    "*.backoffLimit": {"minimum": 0},
    "*.waitSeconds": {"minimum": 0, "maximum": 3600},
    "adminToken.key": {"minLength": 1},
    "security.superUserRoles": {"items": {"type": "string", "minLength": 1}},
    "security.certificates.source": one_of("job", "certManager", "secrets"),
    "security.certificates.days": {"minimum": 2, "maximum": 3650},
    "security.certificates.brokerNames": {"items": {"type": "string", "minLength": 1}},
    "security.certificates.issuer.kind": one_of("Issuer", "ClusterIssuer"),
    "security.credentials.source": one_of("job", "secrets"),
    "secretsJob.schedule": {"pattern": "^(@[a-z]+|[^ ]+( +[^ ]+){4})$"},
    "secretsJob.settleSeconds": {"minimum": 0, "maximum": 3600},
    "metrics.podMonitor.tlsConfig": FREE,
    "metrics.podMonitor.authorization": FREE,
    "backup.schedule": {"pattern": "^(@[a-z]+|[^ ]+( +[^ ]+){4})$"},
    "backup.keep": COUNT,
    "backup.*HistoryLimit": {"minimum": 0},
    "backup.startingDeadlineSeconds": {"minimum": 60},
    "backup.activeDeadlineSeconds": {"minimum": 60},
    "backup.overdueAfterSeconds": {"minimum": 60},
    "audit.schedule": {"pattern": "^(@[a-z]+|[^ ]+( +[^ ]+){4})$"},
    "audit.level": one_of("quick", "standard", "deep"),
    "audit.sinceVerified": {"pattern": "^([0-9]+[dhms])*$"},
    "audit.rate": {"pattern": "^[0-9]+(\\.[0-9]+)?([KMG]i?B/s)?$"},
    "audit.extraArgs": {"items": {"type": "string", "pattern": "^--[a-z]"}},
    "audit.cores": {"minimum": 1, "maximum": 1024},
    "audit.keepRuns": {"minimum": 2},
    "audit.*HistoryLimit": {"minimum": 0},
    "audit.startingDeadlineSeconds": {"minimum": 60},
    "audit.activeDeadlineSeconds": {"minimum": 60},
    "audit.overdueAfterSeconds": {"minimum": 60},
    "audit.executors.instances": COUNT,
    "audit.executors.cores": COUNT,
    "audit.executors.requestCpu": RESOURCE,
    "audit.executors.serviceAccount": {
        "type": "object",
        "properties": {"create": {"type": "boolean"}, "name": {"type": "string"}, "annotations": STRINGS},
        "additionalProperties": False,
    },
    "audit.executors.memoryOverhead": QUANTITY,
    "audit.sparkConf": STRINGS,
    "helmTest.messages": {"minimum": 1, "maximum": 5000},
    "metrics.podMonitor.interval": {"pattern": "^([0-9]+(ms|s|m|h))+$"},
    "metrics.podMonitor.scrapeTimeout": {"pattern": "^([0-9]+(ms|s|m|h))+$"},
    "metrics.rules.disabled": {"items": {"type": "string"}},
    "metrics.rules.merge": {
        "type": "object",
        "additionalProperties": {
            "type": "object",
            "properties": {
                **{key: {"type": "string"} for key in ("expr", "for", "keep_firing_for")},
                **dict.fromkeys(("labels", "annotations"), STRINGS),
            },
            "additionalProperties": False,
        },
    },
}
"""Path pattern in values.yaml -> schema, in addition to the type of the default. All matching patterns apply, later
ones with precedence. A schema with a `type` replaces the type of the default."""

EMPTY: Final[tuple[Any, ...]] = ("", [], {}, False)
"""Defaults that are equivalent to no value; templates accept both."""

REFUSED: Final = {
    "bookie": {"autoscaling": {"description": "Not offered; the chart says why."}},
}
"""Keys that the schema accepts, so that the chart can refuse them with an explanation."""


def main() -> None:
    text = render(schema())
    if sys.argv[1:] != ["--check"]:
        SCHEMA.write_text(text)
    elif not SCHEMA.exists() or SCHEMA.read_text() != text:
        sys.exit(
            "charts/bindery/values.schema.json is not what values.yaml and the settings make: run `make chart-files`"
        )


def schema() -> Schema:
    """The whole schema. Reads values.yaml."""
    source = (CHART / "values.yaml").read_text()
    values, comments = yaml.safe_load(source), dict(comments_of(source))
    shared = block(values["defaults"], ("defaults",), comments)
    definitions = shared["properties"]
    references: Schema = {name: {"$ref": f"#/definitions/{name}"} for name in definitions}
    properties = {}
    for name, value in values.items():
        if name == "defaults":
            properties[name] = {**shared, "properties": references}
        elif name in WORKLOADS:
            properties[name] = workload(name, value, comments, references)
        else:
            properties[name] = of_value(value, (name,), comments)
    made = {"type": "object", "additionalProperties": False, "properties": properties}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart bindery",
        **insisting(made, values, definitions),
        "definitions": definitions,
    }


def insisting(made: Schema, value: Any, definitions: Schema, *, is_default: bool = False) -> Schema:
    """Extend `made` so that it refuses `null` for values with a default; maps with free keys are unchanged.

    A key of `defaults` is required there, but not in the workloads, which inherit it.
    """
    target = resolved(made, definitions) if is_default else made
    if not isinstance(value, dict) or target.get("additionalProperties") is not False:
        return made
    properties = {
        key: insisting(inner, value.get(key), definitions, is_default=is_default or key == "defaults")
        for key, inner in target["properties"].items()
    }
    required = [
        key
        for key, default in value.items()
        if default not in EMPTY
        and (is_default or "$ref" not in properties[key])
        and not is_free(resolved(properties[key], definitions))
    ]
    if target is not made:
        return {"allOf": [made, {"required": required}]} if required else made
    return {**made, "properties": properties} | ({"required": required} if required else {})


def resolved(made: Schema, definitions: Schema) -> Schema:
    """Resolve a reference; other schemas are returned unchanged."""
    found: Schema = definitions[made["$ref"].rpartition("/")[2]] if "$ref" in made else made
    return found


def is_free(made: Schema) -> bool:
    """Whether a map has keys that the operator or Kubernetes defines."""
    return made.get("type") == "object" and made.get("additionalProperties") is not False


def workload(name: str, value: Schema, comments: Mapping[tuple[str, ...], str], references: Schema) -> Schema:
    own = {key: inner for key, inner in value.items() if key not in references and key != "config"}
    made = block(own, (name,), comments)
    properties = made["properties"] | references | REFUSED.get(name, {})
    if name in SERVICES:
        settings, beside = SERVICES[name]
        properties["config"] = of_settings(settings, beside)
    elif "config" in value:
        properties["config"] = of_value(value["config"], (name, "config"), comments)
    return {**made, "properties": properties}


def block(value: Schema, path: tuple[str, ...], comments: Mapping[tuple[str, ...], str]) -> Schema:
    """A block of the chart, which accepts only the listed keys."""
    properties = {key: of_value(inner, (*path, key), comments) for key, inner in value.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def of_value(value: Any, path: tuple[str, ...], comments: Mapping[tuple[str, ...], str]) -> Schema:
    """Schema of the value at `path` with the default `value`."""
    said = {"description": comments[path]} if path in comments else {}
    found: Schema = {}
    for pattern, shape in SHAPES.items():
        if fnmatchcase(".".join(path), pattern):
            found = {**found, **shape}
    if "type" in found:
        return {**said, **found}
    match value:
        case bool():
            kind: Schema = {"type": "boolean"}
        case int():
            kind = {"type": "integer"}
        case str():
            kind = {"type": "string"}
        case list():
            kind = {"type": "array", "items": FREE}
        case {} if value:
            kind = block(value, path, comments)
        case {}:
            kind = FREE
        case _:
            raise TypeError(f"{'.'.join(path)}: no value may be {value!r}; give it a default that shows its type")
    return {**said, **kind, **found}


def comments_of(source: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path -> `# --` comment above the key."""
    path: list[tuple[int, str]] = []
    comment = ""
    for line in source.splitlines():
        if found := re.match(r"\s*# -- (.*)", line):
            comment = found[1]
        elif found := re.match(r"( *)([A-Za-z_][\w./-]*):(?: |$)", line):
            indent = len(found[1])
            path = [place for place in path if place[0] < indent] + [(indent, found[2])]
            if comment:
                yield tuple(name for _, name in path), comment
            comment = ""


def of_settings(cls: type[Settings], beside: Mapping[str, type[Settings]]) -> Schema:
    """The settings of a service, in camelCase. Asserts that the chart's environment variables are those settings."""
    prefix = cls.model_config["env_prefix"]
    texts = descriptions(cls)
    properties: Schema = {}
    groups = {name: field.group for name, field in cls.model_fields.items() if field.group is not None}
    for name, group in {**groups, **beside}.items():
        expected = f"{prefix}{name.upper()}_"
        assert group.model_config["env_prefix"] == expected, f"{group.__name__} is not read from {expected}..."
        properties[camel(name)] = of_settings(group, {})
    for name, field in cls.model_fields.items():
        if field.group is None and name not in BY_CHART and not is_secret(field):
            properties[camel(name)] = of_setting(name, field, texts.get(name, ""))
    return {"type": "object", "additionalProperties": False, "properties": dict(sorted(properties.items()))}


def is_secret(field: SettingField) -> bool:
    """Whether a setting is a secret. Secrets come from `extraEnvFrom`, never from values."""
    return field.value_type is not None and field.value_type.base is SecretStr


def of_setting(name: str, field: SettingField, text: str) -> Schema:
    assert field.value_type is not None
    base = field.value_type.base
    found: Schema = {"description": " ".join(text.split())}
    if name == "log_level":
        return {**found, **one_of("debug", "info", "warning", "error")}
    if base is bool:
        return {**found, "type": "boolean"}
    if isinstance(base, type) and issubclass(base, Enum):
        return {**found, "type": "string", "enum": [member.value for member in base]}
    if base not in (int, float):
        return {**found, "type": "string"}
    words = {
        "at least": "minimum",
        "more than": "exclusiveMinimum",
        "at most": "maximum",
        "less than": "exclusiveMaximum",
    }
    bounds = {words[bound.words]: bound.limit for bound in field.bounds}
    if base is int and re.search(r"size|bytes", name):
        return {**found, "type": ["integer", "string"], "pattern": "^[0-9]+(\\.[0-9]+)?[KMGT]i$", **bounds}
    if base is float:  # `--set` passes a number with a decimal point as text
        return {**found, "type": ["number", "string"], "pattern": "^[0-9]+(\\.[0-9]+)?$", **bounds}
    return {**found, "type": "integer", **bounds}


def camel(name: str) -> str:
    first, *rest = name.split("_")
    made = first + "".join(word[:1].upper() + word[1:] for word in rest)
    back = re.sub("([A-Z])", r"_\1", made).upper()
    assert back == name.upper(), f"{name} as a value is {made}, and that would be {back} in the environment"
    return made


def render(value: Any, indent: int = 0) -> str:
    """Format as JSON; values that fit on one line are not broken."""
    line = json.dumps(value, ensure_ascii=False)
    end = "" if indent else "\n"
    if not isinstance(value, dict) or len(line) + indent <= WIDTH:
        return line + end
    margin = " " * (indent + 2)
    inner = [f"{margin}{json.dumps(key)}: {render(item, indent + 2)}" for key, item in value.items()]
    return "{\n" + ",\n".join(inner) + f"\n{' ' * indent}}}" + end


if __name__ == "__main__":
    main()
