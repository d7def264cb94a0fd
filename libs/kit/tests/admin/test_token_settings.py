"""The tokens of operators that settings describe."""

from pathlib import Path

import pytest
from bindery_core.errors import BadRequest, Unauthorized
from bindery_identity.tokens import sign
from bindery_kit.admin.token_settings import AdminTokenSettings

SECRET = "a-secret-of-the-operators"
KEY = b"k" * 32


def check(settings: AdminTokenSettings, token: bytes) -> str:
    access = settings.access(now_s=lambda: 0)
    assert access is not None
    return access.check([(b"authorization", b"Bearer " + token)])


def test_without_settings_there_is_no_check() -> None:
    assert not AdminTokenSettings().is_set
    assert AdminTokenSettings().access(now_s=lambda: 0) is None


def test_a_file_of_secrets_or_of_keys_is_used(tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text(SECRET)
    (tmp_path / "keys").write_bytes(KEY)
    assert AdminTokenSettings(token_file=str(tmp_path / "secrets")).is_set
    check(AdminTokenSettings(token_file=str(tmp_path / "secrets")), SECRET.encode())
    for audience in ("", "auditors"):
        settings = AdminTokenSettings(keys_file=str(tmp_path / "keys"), audience=audience)
        assert settings.is_set
        assert check(settings, sign(KEY, subject="operator", audience=audience or None)) == "operator"
        with pytest.raises(Unauthorized, match="audience"):
            check(settings, sign(KEY, subject="operator", audience="others"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"audience": "x"}, "needs one of admin.token_file and admin.keys_file"),
        ({"token_file": "/a", "keys_file": "/b"}, "needs one of admin.token_file and admin.keys_file"),
        ({"token_file": "/a", "audience": "x"}, "an audience needs signed tokens: set admin.keys_file"),
        ({"token_file": "/none/such"}, "cannot read the file of secrets"),
        ({"keys_file": "/none/such"}, "cannot read the file of keys"),
        ({"token_file": "/dev/null"}, "no shared secret is configured"),
        ({"keys_file": "/dev/null"}, "no signing key is configured"),
        ({"keys_file": "file:///dev/null"}, "signing key is too short"),
    ],
)
def test_settings_that_do_not_describe_tokens_are_refused_and_do_not_open_the_port(
    settings: dict[str, str], told: str
) -> None:
    assert AdminTokenSettings(**settings).is_set
    with pytest.raises(BadRequest, match=told):
        AdminTokenSettings(**settings).access(now_s=lambda: 0)
