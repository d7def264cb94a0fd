"""Secrets of a cluster: complete, private, kept when they are usable, and renewed when they are not."""

import multiprocessing
import os
import ssl
import stat
from pathlib import Path

import pytest
from bindery_core.errors import BadRequest
from bindery_identity.authority import Authority, facts, new_private_key, normal_host
from bindery_identity.cluster_secrets import Action, Made, Wanted, create
from bindery_identity.keys import parse_keys
from bindery_identity.secret_directory import SecretDirectory
from bindery_identity.tokens import SignedTokens

NOW_S = 1_800_000_000.0
DAY_S = 86_400.0
WANTED = Wanted(
    servers={"broker": ["localhost", "127.0.0.1"]}, clients=["scraper"], roles=["admin"], zookeeper=True, days=90
)


def actions(made: list[Made]) -> dict[str, Action]:
    return {one.file.name: one.action for one in made}


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_all_secrets_are_made_and_only_their_owner_can_read_them(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secrets"
    before = os.umask(0)
    try:
        made = create(path, WANTED, now_s=NOW_S)
    finally:
        os.umask(before)
    assert set(actions(made).values()) == {Action.CREATED}
    assert sorted(actions(made)) == sorted(contents(path))
    public = {"ca.crt", "broker.crt", "scraper.crt", "tokens.pub"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for file in path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == (0o644 if file.name in public else 0o600), file.name
    found = facts((path / "broker.crt").read_bytes())
    assert (found.common_name, found.hosts) == ("broker", ("localhost", "127.0.0.1"))
    assert found.expires_at_s == NOW_S + 90 * DAY_S
    verifier = SignedTokens(parse_keys((path / "tokens.pub").read_bytes()))
    assert verifier.verify((path / "admin.token").read_bytes().strip(), now_s=NOW_S).subject == "admin"
    assert (path / "zookeeper.credentials").read_text().startswith("bindery:")


def test_a_server_and_a_client_with_these_certificates_complete_a_handshake(tmp_path: Path) -> None:
    import time

    create(tmp_path / "s", WANTED, now_s=time.time())
    files = {name: str(tmp_path / "s" / name) for name in ("ca.crt", "broker.pem", "scraper.crt", "scraper.key")}
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files["ca.crt"])
    server.load_cert_chain(files["broker.pem"])
    server.verify_mode = ssl.CERT_REQUIRED
    client = ssl.create_default_context(cafile=files["ca.crt"])
    client.load_cert_chain(files["scraper.crt"], files["scraper.key"])
    for context in (server, client):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    pipes = [ssl.MemoryBIO(), ssl.MemoryBIO()]
    ends = [
        client.wrap_bio(pipes[0], pipes[1], server_hostname="127.0.0.1"),
        server.wrap_bio(pipes[1], pipes[0], server_side=True),
    ]
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    peer = ends[1].getpeercert()
    assert peer is not None
    assert (("commonName", "scraper"),) in peer["subject"]


def test_what_is_usable_is_kept(tmp_path: Path) -> None:
    create(tmp_path / "s", WANTED, now_s=NOW_S)
    before = contents(tmp_path / "s")
    made = create(tmp_path / "s", WANTED, now_s=NOW_S + 59 * DAY_S)
    assert set(actions(made).values()) == {Action.KEPT}
    assert contents(tmp_path / "s") == before


def test_what_is_near_its_end_is_renewed_by_the_same_authority_with_the_same_key(tmp_path: Path) -> None:
    create(tmp_path / "s", WANTED, now_s=NOW_S)
    before = contents(tmp_path / "s")
    later_s = NOW_S + 61 * DAY_S
    made = create(tmp_path / "s", WANTED, now_s=later_s)
    after = contents(tmp_path / "s")
    renewed = {name for name, action in actions(made).items() if action is Action.RENEWED}
    assert renewed == {"broker.crt", "broker.pem", "scraper.crt", "admin.token"}
    assert {name for name in after if after[name] != before[name]} == renewed
    assert after["broker.pem"] == after["broker.key"] + after["broker.crt"]
    assert Authority.load(after["ca.crt"], after["ca.key"]).has_issued(after["broker.crt"], after["broker.key"])
    assert {one.why for one in made if one.file.suffix in (".crt", ".token") and one.why} == {"it is near its end"}
    assert facts(after["broker.crt"]).expires_at_s == later_s + 90 * DAY_S


def test_a_host_that_a_certificate_lacks_renews_it_and_a_host_too_many_does_not(tmp_path: Path) -> None:
    def made(*hosts: str) -> Action:
        files = create(tmp_path / "s", Wanted(servers={"broker": hosts}), now_s=NOW_S)
        return actions(files)["broker.crt"]

    assert made("a.example.com", "::1") is Action.CREATED
    assert made("0:0::1", "A.Example.com") is Action.KEPT
    assert made("a.example.com") is Action.KEPT
    assert made("a.example.com", "b.example.com") is Action.RENEWED


def test_a_certificate_of_another_authority_and_a_token_of_another_key_are_replaced(tmp_path: Path) -> None:
    create(tmp_path / "a", WANTED, now_s=NOW_S)
    create(tmp_path / "b", WANTED, now_s=NOW_S)
    for name in ("broker.crt", "admin.token"):
        (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    again = {one.file.name: one for one in create(tmp_path / "a", WANTED, now_s=NOW_S)}
    assert again["broker.crt"].why == "it is of another authority or key"
    assert again["admin.token"].why == "token has a wrong signature"


@pytest.mark.parametrize("cut", range(1, 11))
def test_a_run_that_was_cut_off_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """At every write: afterwards, certificates, keys and tokens belong together."""
    writes = 0
    write = SecretDirectory.write

    def cut_off(self: SecretDirectory, name: str, content: bytes, *, secret: bool) -> None:
        nonlocal writes
        writes += 1
        if writes == cut:
            raise KeyboardInterrupt
        write(self, name, content, secret=secret)

    monkeypatch.setattr(SecretDirectory, "write", cut_off)
    with pytest.raises(KeyboardInterrupt):
        create(tmp_path / "s", WANTED, now_s=NOW_S)
    monkeypatch.undo()
    create(tmp_path / "s", WANTED, now_s=NOW_S)
    found = contents(tmp_path / "s")
    authority = Authority.load(found["ca.crt"], found["ca.key"])
    assert authority.has_issued(found["broker.crt"], found["broker.key"])
    assert authority.has_issued(found["scraper.crt"], found["scraper.key"])
    assert found["broker.pem"] == found["broker.key"] + found["broker.crt"]
    SignedTokens(parse_keys(found["tokens.pub"])).verify(found["admin.token"].strip(), now_s=NOW_S)


def test_a_failed_write_leaves_the_old_content_and_no_file_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = SecretDirectory(tmp_path / "s")
    directory.write("token", b"old", secret=True)

    def full(_number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadRequest, match="No space left"):
        directory.write("token", b"new", secret=True)
    assert contents(tmp_path / "s") == {"token": b"old"}


def test_two_processes_that_begin_at_once_make_one_set(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=create, args=(tmp_path / "s", WANTED), kwargs={"now_s": NOW_S}) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    found = contents(tmp_path / "s")
    assert Authority.load(found["ca.crt"], found["ca.key"]).has_issued(found["broker.crt"], found["broker.key"])
    assert not [name for name in found if name.startswith(".")]


def test_a_copied_secret_gets_its_mode(tmp_path: Path) -> None:
    create(tmp_path / "s", WANTED, now_s=NOW_S)
    for name in ("ca.key", "broker.key", "tokens.key", "admin.token", "zookeeper.credentials"):
        (tmp_path / "s" / name).chmod(0o644)
    create(tmp_path / "s", WANTED, now_s=NOW_S)
    for name in ("ca.key", "broker.key", "tokens.key", "admin.token", "zookeeper.credentials"):
        assert stat.S_IMODE((tmp_path / "s" / name).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda path: path.chmod(0o750), "chmod 700"),
        (lambda path: (path / "ca.key").unlink(), "key of the certificate authority is missing"),
        (lambda path: (path / "ca.key").write_bytes(new_private_key()), "does not belong to the certificate"),
        (lambda path: (path / "ca.crt").write_text("?"), "not a certificate"),
        (lambda path: (path / "ca.crt").write_bytes((path / "broker.crt").read_bytes()), "not that of an authority"),
        (lambda path: (path / "broker.key").write_text("?"), "not a private key"),
        (lambda path: (path / "tokens.key").unlink(), "key that signs tokens is missing"),
        (lambda path: (path / "tokens.key").write_bytes(new_private_key()), "lacks the key of the private key"),
        (lambda path: (path / "zookeeper.credentials").write_text("?"), "user:password"),
    ],
)
def test_files_that_do_not_fit_are_named(tmp_path: Path, spoil: object, told: str) -> None:
    create(tmp_path / "s", WANTED, now_s=NOW_S)
    assert callable(spoil)
    spoil(tmp_path / "s")
    with pytest.raises(BadRequest, match=told) as refused:
        create(tmp_path / "s", WANTED, now_s=NOW_S)
    assert str(tmp_path) in str(refused.value)


def test_an_authority_that_has_expired_signs_nothing_and_none_is_made_in_its_place(tmp_path: Path) -> None:
    create(tmp_path / "s", WANTED, now_s=NOW_S)
    with pytest.raises(BadRequest, match="has expired"):
        create(tmp_path / "s", WANTED, now_s=NOW_S + 3651 * DAY_S)


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    create(tmp_path / "s", Wanted(servers={"broker": ["localhost"]}, days=5000), now_s=NOW_S)
    ends = {facts((tmp_path / "s" / name).read_bytes()).expires_at_s for name in ("ca.crt", "broker.crt")}
    assert len(ends) == 1


def test_a_lost_public_key_is_made_from_the_private_one(tmp_path: Path) -> None:
    create(tmp_path / "s", WANTED, now_s=NOW_S)
    before = contents(tmp_path / "s")
    (tmp_path / "s" / "tokens.pub").unlink()
    create(tmp_path / "s", WANTED, now_s=NOW_S)
    assert contents(tmp_path / "s") == before


@pytest.mark.parametrize("name", ["", "ca", "tokens", "../x", "a/b", ".hidden", "-x", "a" * 65])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(BadRequest):
        Wanted(clients=[name])


@pytest.mark.parametrize("host", ["", "a b", "http://a", "a..b", "*", "a.*", "-a", "a" * 254, "\u00e4.example.com"])
def test_hosts_that_are_none_are_refused(host: str) -> None:
    with pytest.raises(BadRequest, match="DNS name"):
        normal_host(host)
