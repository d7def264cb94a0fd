"""Settings of OpenID issuers: what contradicts itself, and errors that name the setting."""

import json
from pathlib import Path
from typing import Any

import pytest
from bindery_core.errors import BadRequest
from bindery_identity.followed import FollowedFiles
from bindery_kit.access.authentication_settings import AuthenticationSettings
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

URL = "https://issuer.example"


@pytest.fixture
def key_set(tmp_path: Path) -> Path:
    path = tmp_path / "jwks.json"
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    path.write_text(json.dumps({"keys": [ECAlgorithm.to_jwk(public, as_dict=True)]}))
    return path


def test_an_issuer_requires_authentication_and_its_file_is_followed(key_set: Path) -> None:
    settings = AuthenticationSettings(openid_issuers=f"{URL},{URL}/file={key_set}", openid_audiences="bindery, pulsar")
    assert settings.is_set
    assert not settings.admits_everybody
    followed: list[FollowedFiles[Any]] = []
    issuers = settings.openid(follow=followed.append)
    assert [(issuer.url, issuer.count) for issuer in issuers] == [(URL, 0), (f"{URL}/file", 1)]
    assert [file.paths for file in followed] == [(str(key_set),)]
    authenticator = settings.authenticator(now_s=lambda: 0.0, follow=followed.append, issuers=issuers)
    assert authenticator is not None
    assert authenticator.challenges == ['Bearer realm="bindery"']
    assert AuthenticationSettings().openid(follow=followed.append) == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"openid_issuers": URL}, r"set auth\.openid_audiences"),
        ({"openid_issuers": URL, "openid_audiences": " , "}, r"set auth\.openid_audiences"),
        ({"openid_audiences": "x"}, r"need auth\.openid_issuers"),
        ({"openid_ca_file": "x"}, r"need auth\.openid_issuers"),
        (
            {"openid_issuers": "http://issuer.example", "openid_audiences": "x"},
            r"auth\.openid_issuers: .*must be https",
        ),
        ({"openid_issuers": URL, "openid_audiences": "x", "openid_role_claim": ""}, r"auth\.openid_role_claim"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AuthenticationSettings(**options)  # type: ignore[arg-type]


def test_files_that_cannot_be_used_are_refused_by_name(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    settings = AuthenticationSettings(
        openid_issuers=f"{URL}={empty}", openid_audiences="x", openid_ca_file=str(tmp_path / "absent")
    )
    with pytest.raises(BadRequest, match="the key set is not JSON"):
        settings.openid(follow=lambda _: None)
    with pytest.raises(BadRequest, match=r"cannot use auth\.openid_ca_file"):
        settings.openid_tls()
