"""Generate charts/bindery/README.md from values.yaml: every value with its default and its `# --` comment.

python tools/chart_readme.py            write the file
python tools/chart_readme.py --check    exit code 1 if the file is out of date
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from chart_schema import CHART, WORKLOADS, comments_of

README: Final = CHART / "README.md"
DEFAULT_SIZE_MAX: Final = 60
"""Maximum characters of a default that is shown; for a longer one the page refers to values.yaml."""

HEAD: Final = """# Bindery: the Helm chart

Bookies, brokers, auditors, ZooKeeper and a toolbox; [docs/images.md](../../docs/images.md) describes how to build
the images, [docs/kubernetes.md](../../docs/kubernetes.md) how to install, run, scale, upgrade and restore, and
[UPGRADING.md](UPGRADING.md) the changes between versions of the chart.

    helm install bindery charts/bindery -n bindery --create-namespace --wait
    helm test bindery -n bindery --logs

Kubernetes {kubernetes}; version {version} of the chart, {app_version} of Bindery. This page is generated from
values.yaml by tools/chart_readme.py.

## Presets

| file | for |
|---|---|
{presets}
## Values

A key that is not listed is refused, and so is a value of the wrong type. Numbers that contradict each other, such as
fewer bookies than an ensemble has, are rejected with a message that names the fix.

`bookie.config`, `broker.config` and `auditor.config` take every setting of these programs in camelCase, not only those
that are listed: `storage.scrubRate` for `--storage-scrub-rate`. Settings of bookies:
[docs/storage.md](../../docs/storage.md#settings). All settings: `bindery-bookie --help`, `bindery-broker --help`,
`bindery-auditor --help`. Sizes may be written `64Mi`.
"""

SHARED: Final = """
Each of these keys can also be set in {workloads}: maps are merged over these, lists and scalar values replace them.
"""


def main() -> None:
    text = render()
    if sys.argv[1:] != ["--check"]:
        README.write_text(text)
    elif not README.exists() or README.read_text() != text:
        sys.exit("charts/bindery/README.md is out of date: run `make chart-files`")


def render() -> str:
    """The whole page. Reads Chart.yaml, values.yaml and the presets."""
    source = (CHART / "values.yaml").read_text()
    values, comments = yaml.safe_load(source), dict(comments_of(source))
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    head = HEAD.format(
        kubernetes=chart["kubeVersion"].removesuffix("-0").replace(">=", "") + " or later",
        version=chart["version"],
        app_version=chart["appVersion"],
        presets="".join(_preset(path) for path in sorted(CHART.glob("values-*.yaml"))),
    )
    single = {name: value for name, value in values.items() if not isinstance(value, dict) or not value}
    parts = [head, "\n### All objects\n\n", _table(single, (), comments)]
    for name, value in values.items():
        if name in single:
            continue
        parts += [f"\n### {name}\n", _said_of_block(source, name), "\n", _table(value, (name,), comments)]
        if name == "defaults":
            workloads = ", ".join(f"`{one}`" for one in WORKLOADS)
            parts.insert(-2, SHARED.format(workloads=workloads))
    return "".join(parts)


def _preset(path: Path) -> str:
    """A row with the file and the first sentence of its first comment."""
    comment = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    return f"| [{path.name}]({path.name}) | {comment.partition('. ')[0].partition(' helm install')[0].rstrip('.')} |\n"


def _said_of_block(source: str, name: str) -> str:
    """The comment directly above a top-level block, unless it is a `# --` comment."""
    lines = source.splitlines()
    at = lines.index(f"{name}:")
    said: list[str] = []
    while at and lines[at - 1].startswith("# ") and not lines[at - 1].startswith("# --"):
        at -= 1
        said.insert(0, lines[at][2:])
    return "\n" + "\n".join(said) + "\n" if said and name != "defaults" else ""


def _table(values: Mapping[str, Any], path: tuple[str, ...], comments: Mapping[tuple[str, ...], str]) -> str:
    rows = [
        f"| `{'.'.join(at)}` | {_default(value)} | {_cell(said)} |\n"
        for at, value, said in _rows(values, path, comments)
    ]
    return "| value | default | |\n|---|---|---|\n" + "".join(rows)


def _rows(
    values: Mapping[str, Any], path: tuple[str, ...], comments: Mapping[tuple[str, ...], str]
) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """Rows of the values with a comment, so that every value is part of a row."""
    for name, value in values.items():
        at = (*path, name)
        inner = list(_rows(value, at, comments)) if isinstance(value, dict) else []
        if at in comments and not any(said for _, _, said in inner):
            yield at, value, comments[at]
        elif isinstance(value, dict) and value:
            yield from inner
        else:
            yield at, value, comments.get(at, "")


def _default(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return f"`{text}`" if len(text) <= DEFAULT_SIZE_MAX else "see values.yaml"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
