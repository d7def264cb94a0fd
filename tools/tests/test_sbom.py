"""The bills of materials describe the locks, and the check finds packages without hashes and without known licences."""

import importlib.metadata
import json

import lock
import pytest
import sbom

DIGEST = "0" * 63 + "1"
LOCKED = f"""\
httpx==0.28.1 \\
    --hash=sha256:{DIGEST} \\
    --hash=sha256:{"2" * 64}
    # via bindery-broker
idna==3.20 \\
    --hash=sha256:{DIGEST}
    # via
    #   bindery-cli (pyproject.toml)
    #   httpx
odd==1 ; sys_platform == 'odd' \\
    --hash=sha256:{DIGEST}
    # via httpx
"""


def test_every_locked_package_has_hashes_and_an_allowed_licence():
    found = sbom.locks()
    assert set(found) == {"workspace", "service", "broker", "toolbox", "spark", "build"}
    assert [line for name, packages in found.items() for line in sbom.problems(name, packages)] == []


def test_each_pin_of_a_lock_is_in_its_document():
    """Pins are counted by another rule than that of the parser."""
    for path, (name, packages) in zip(lock.EXPORTS, sbom.locks().items(), strict=True):
        pins = [line.split()[0] for line in path.read_text().splitlines() if "==" in line and line[0] not in " #"]
        made = sbom.document(name, packages, version="1.2.3")
        assert [f"{one['name']}=={one['version']}" for one in made["components"]] == pins
        assert all(one["hashes"] for one in made["components"])
        refs = {one["bom-ref"] for one in made["components"]}
        reached, ahead = set(), [f"bindery-{name}"]
        needs = {one["ref"]: one["dependsOn"] for one in made["dependencies"]}
        while ahead:
            for ref in needs[ahead.pop()]:
                if ref not in reached:
                    reached.add(ref)
                    ahead.append(ref)
        assert reached == refs, "a component that nothing needs"


def test_a_document():
    made = sbom.document("broker", sbom.parse(LOCKED), version="1.2.3")
    httpx, idna, odd = made["components"]
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    assert made["metadata"]["component"]["version"] == "1.2.3"
    assert httpx["purl"] == "pkg:pypi/httpx@0.28.1"
    assert httpx["licenses"] == [{"expression": "BSD-3-Clause"}]
    assert httpx["hashes"] == [{"alg": "SHA-256", "content": digest} for digest in (DIGEST, "2" * 64)]
    assert "licenses" not in odd
    assert made["dependencies"] == [
        {"ref": "bindery-broker", "dependsOn": [httpx["purl"], idna["purl"]]},
        {"ref": httpx["purl"], "dependsOn": [idna["purl"], odd["purl"]]},
        {"ref": idna["purl"], "dependsOn": []},
        {"ref": odd["purl"], "dependsOn": []},
    ]
    assert json.dumps(made) == json.dumps(sbom.document("broker", sbom.parse(LOCKED), version="1.2.3"))


@pytest.mark.parametrize(
    ("locked", "told"),
    [
        ("httpx==0.28.1\n", "has no hash"),
        (f"httpx==0.1 \\\n    --hash=sha256:{DIGEST}\n", "version 0.28.1 is installed"),
        (f"no-such-package==1 \\\n    --hash=sha256:{DIGEST}\n", "not installed"),
    ],
)
def test_what_is_wrong_is_reported(locked, told):
    (line,) = sbom.problems("broker", sbom.parse(locked))
    assert told in line
    assert line.startswith("broker: ")


def test_a_licence_that_is_not_in_the_list_is_reported(monkeypatch):
    monkeypatch.setitem(sbom.OF_PACKAGE, "httpx", "GPL-3.0-only")
    (line,) = sbom.problems("broker", sbom.parse(LOCKED))
    assert "httpx 0.28.1 has the licence GPL-3.0-only, which is not in the list" in line


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 AND MIT", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only AND MIT", False),
        ("MIT OR GPL-3.0-only AND MIT", True),
        ("(MIT)", False),
        ("", False),
    ],
)
def test_expressions(expression, allowed):
    assert sbom.is_allowed(expression) is allowed


@pytest.mark.parametrize(
    ("text", "classifiers", "expression"),
    [
        ("", ["License :: OSI Approved :: MIT License"], "MIT"),
        ("Apache 2.0", [], "Apache-2.0"),
        ("MIT License\n\nThe whole text", ["License :: OSI Approved :: MIT License"], "MIT"),
        ("", ["License :: OSI Approved :: BSD License"], None),
        ("", [], None),
    ],
)
def test_metadata(monkeypatch, text, classifiers, expression):
    class Found:
        version = "1"
        metadata = importlib.metadata.PackageMetadata

    message = importlib.metadata.metadata("httpx")
    for name in ("License", "License-Expression", "Classifier"):
        del message[name]
    if text:
        message["License"] = text
    for one in classifiers:
        message["Classifier"] = one
    Found.metadata = message
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Found)
    (package,) = sbom.parse("thing==1\n")
    if expression is not None:
        assert sbom.licence(package) == expression
        return
    with pytest.raises(LookupError, match="does not name one licence"):
        sbom.licence(package)


def test_a_line_that_is_not_understood_is_refused():
    with pytest.raises(ValueError, match="line 2 of the lock"):
        sbom.parse("httpx==0.28.1\n-e git+ssh://example\n")
