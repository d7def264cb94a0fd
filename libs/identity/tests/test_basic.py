import pytest
from bindery_core.errors import BadRequest, Unauthorized
from bindery_identity import basic
from bindery_identity.basic import PASSWORD_SIZE_MAX, Passwords

# Written by `openssl passwd -apr1 -salt SALT PASSWORD` and `htpasswd -nbs`.
FILE = b"""\
# the clients of the test suite
admin:$apr1$abcdefgh$ZAdX7G.l3eDbgTYbm5ePE0

reader:{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g=
"""


def test_passwords_of_both_forms_are_verified() -> None:
    passwords = Passwords(FILE)
    for _ in range(2):  # the second time from memory
        assert passwords.verify("admin", b"secret pass") == "admin"
        assert passwords.verify("reader", b"password") == "reader"


@pytest.mark.parametrize(
    ("name", "password"),
    [("admin", b"password"), ("reader", b"secret pass"), ("nobody", b"password"), ("", b""), ("admin", b""),
     ("admin", b"secret pass "), ("Admin", b"secret pass"), ("admin", b"x" * (PASSWORD_SIZE_MAX + 1))],
)  # fmt: skip
def test_a_wrong_name_or_password_is_refused_with_the_same_error(name: str, password: bytes) -> None:
    passwords = Passwords(FILE)
    passwords.verify("admin", b"secret pass")
    with pytest.raises(Unauthorized) as refused:
        passwords.verify(name, password)
    assert str(refused.value) == "wrong name or password"


@pytest.mark.parametrize(
    ("name", "password"), [("admin", b"wrong"), ("reader", b"wrong"), ("nobody", b"wrong"), ("nobody", b"password")]
)
def test_each_refusal_costs_the_same(name: str, password: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the time of a refusal tells which names exist. Counts the slow hashes, because times vary."""
    passwords = Passwords(FILE)
    passwords.verify("admin", b"secret pass")
    passwords.verify("reader", b"password")
    slow, hashed = [], basic._apr1

    def counted(password: bytes, salt: bytes) -> bytes:
        slow.append(len(salt))
        return hashed(password, salt)

    monkeypatch.setattr(basic, "_apr1", counted)
    with pytest.raises(Unauthorized):
        passwords.verify(name, password)
    assert slow == [8]


def test_a_password_is_remembered_once_it_was_right() -> None:
    passwords = Passwords(FILE)
    assert not passwords.remembers("admin", b"secret pass")
    passwords.verify("admin", b"secret pass")
    assert passwords.remembers("admin", b"secret pass")
    for name, password in (("admin", b"wrong"), ("nobody", b"secret pass"), ("reader", b"password"), ("", b"")):
        assert not passwords.remembers(name, password)
    assert b"secret pass" not in repr(vars(passwords)).encode()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"x:$2y$05$c4WoMPo3SXsafkva.HHa6uXQZWr7oboPiC2bT/r7q1BB8I2s0BRqC", "bcrypt"),
        (b"x:rqXexS6ZhobKA", "crypt"),
        (b"x:clear text", "clear text"),
        (b"x:", "no supported form"),
        (b"x", "no supported form"),
        (b"x:{SHA}short", "SHA"),
        (b"x:{SHA}!!!!", "SHA"),
        (b":$apr1$abcdefgh$ZAdX7G.l3eDbgTYbm5ePE0", "printable"),
        (b"\xff:$apr1$abcdefgh$ZAdX7G.l3eDbgTYbm5ePE0", "printable"),
        (b"admin:$apr1$abcdefgh$ZAdX7G.l3eDbgTYbm5ePE0", "twice"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_by_its_number(line: bytes, told: str) -> None:
    with pytest.raises(BadRequest, match=told) as refused:
        Passwords(FILE + line)
    assert refused.value.facts == {"line": 5}
    assert "abcdefgh" not in str(refused.value)


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(BadRequest, match="no password"):
        Passwords(b"# nobody\n")


def test_hashes_of_all_lengths_agree_with_those_of_openssl() -> None:
    """Written by `openssl passwd -apr1`."""
    for password, line in OPENSSL.items():
        assert Passwords(b"x:" + line).verify("x", password) == "x"


OPENSSL = {
    b"": b"$apr1$Sa.t/9$b4NKebzNfN/5baM9a6Z3d1",
    b"a": b"$apr1$Sa.t/9$kVDGCns/9znuI2Sg.bp6r/",
    b"0123456789abcdef": b"$apr1$Sa.t/9$JY4tnR4oo2gR5d4QwGy6n1",
    b"0123456789abcdefg": b"$apr1$Sa.t/9$3ka.yTGbp0qh115yQf9TR1",
    b"a much longer password of more than thirty-two bytes": b"$apr1$Sa.t/9$G0ruJ6wKvRZKAm.K88WL7/",
}
