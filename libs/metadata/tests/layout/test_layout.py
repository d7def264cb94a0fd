"""Paths are those of the specification's tables, and every ledger id can be read back from its path."""

import pytest
from bindery_core.errors import BadRequest
from bindery_core.ids import ID_MAX, BookieId, LedgerId
from bindery_metadata.layout.layout import (
    LAYOUT_TEXT,
    SHORT_ID_END,
    BinderyLayout,
    CheckKind,
    LedgersLayout,
    is_long_top,
    is_short_top,
)
from bindery_metadata.layout.znode_path import ancestors, validate_path
from bindery_pulsar import znode_layout
from hypothesis import given, settings
from hypothesis import strategies as st

LAYOUT = LedgersLayout()
LEDGER_IDS = st.one_of(
    st.integers(0, ID_MAX),
    st.integers(0, 100_000),
    st.integers(SHORT_ID_END - 3, SHORT_ID_END + 3),
    st.integers(ID_MAX - 3, ID_MAX),
).map(LedgerId)


@pytest.mark.parametrize(
    ("ledger_id", "path"),
    [
        (0, "/ledgers/00/0000/L0000"),
        (1, "/ledgers/00/0000/L0001"),
        (123456789, "/ledgers/01/2345/L6789"),
        (2147483646, "/ledgers/21/4748/L3646"),
        (2147483647, "/ledgers/000/0000/0021/4748/L3647"),
        (4294967301, "/ledgers/000/0000/0042/9496/L7301"),
        (ID_MAX, "/ledgers/922/3372/0368/5477/L5807"),
    ],
)
def test_ledger_paths_are_those_of_bookkeeper(ledger_id: int, path: str) -> None:
    assert LAYOUT.ledger(LedgerId(ledger_id)) == path
    assert LAYOUT.ledger_id(path) == ledger_id


@given(ledger_id=LEDGER_IDS, root=st.sampled_from(["/ledgers", "/a/b/ledgers", "/00"]))
@settings(deadline=None)
def test_a_path_is_parsed_to_its_ledger_id(ledger_id: LedgerId, root: str) -> None:
    layout = LedgersLayout(root)
    path = layout.ledger(ledger_id)
    assert layout.ledger_id(validate_path(path)) == ledger_id
    top = path.removeprefix(root + "/").split("/")[0]
    assert is_short_top(top) == (ledger_id < SHORT_ID_END)
    assert is_long_top(top) == (ledger_id >= SHORT_ID_END)


@given(first=LEDGER_IDS, second=LEDGER_IDS)
@settings(deadline=None)
def test_paths_of_one_length_sort_like_their_ids(first: LedgerId, second: LedgerId) -> None:
    one, two = LAYOUT.ledger(first), LAYOUT.ledger(second)
    if len(one) == len(two):
        assert (one < two) == (first < second)


@pytest.mark.parametrize("ledger_id", [-1, ID_MAX + 1])
def test_ids_out_of_range_have_no_path(ledger_id: int) -> None:
    with pytest.raises(BadRequest):
        LAYOUT.ledger(LedgerId(ledger_id))


@pytest.mark.parametrize(
    "path",
    [
        "/ledgers",
        "/ledgers/available",
        "/ledgers/LAYOUT",
        "/ledgers/idgen/ID-0000000000",
        "/ledgers/00/0000",
        "/ledgers/00/0000/0000",
        "/ledgers/00/0000/L000",
        "/ledgers/00/0000/L0000/x",
        "/other/00/0000/L0000",
        "/ledgers/99/9999/L9999",  # would be a long id
        "/ledgers/000/0000/0000/0000/L0001",  # would be a short id
        "/ledgers/999/9999/9999/9999/L9999",  # more than 63 bits
        "/ledgers/\u0660\u0660/0000/L0000",  # digits, but not ASCII
    ],
)
def test_other_paths_have_no_ledger_id(path: str) -> None:
    assert LAYOUT.ledger_id(path) is None


@pytest.mark.parametrize(
    ("ledger_id", "mark"),
    [
        (5, "ledgers/0000/0000/0000/0005/urL0000000005"),
        (4294967301, "ledgers/0000/0001/0000/0005/urL4294967301"),
        (ID_MAX, "ledgers/7fff/ffff/ffff/ffff/urL9223372036854775807"),
    ],
)
def test_mark_paths_are_those_of_bookkeeper(ledger_id: int, mark: str) -> None:
    path = LAYOUT.mark(LedgerId(ledger_id))
    assert path == f"/ledgers/underreplication/{mark}"
    assert LAYOUT.mark_ledger_id(path) == ledger_id
    assert LAYOUT.mark_lock(LedgerId(ledger_id)) == f"/ledgers/underreplication/locks/{mark.rsplit('/', 1)[1]}"


def test_other_nodes_are_not_marks() -> None:
    assert LAYOUT.mark_ledger_id("/ledgers/underreplication/ledgers/0000") is None
    assert LAYOUT.mark_ledger_id("/ledgers/underreplication/locks/urLx") is None


def test_fixed_paths_are_those_of_bookkeeper() -> None:
    bookie = BookieId("10.0.0.1:3181")
    assert [
        LAYOUT.layout,
        LAYOUT.instance_id,
        LAYOUT.available,
        LAYOUT.available_readonly,
        LAYOUT.bookie(bookie, read_only=False),
        LAYOUT.bookie(bookie, read_only=True),
        LAYOUT.cookies,
        LAYOUT.cookie(bookie),
        LAYOUT.idgen,
        LAYOUT.idgen_long,
        LAYOUT.hob(1),
        LAYOUT.underreplication_layout,
        LAYOUT.auditor_election,
        LAYOUT.replication_disabled,
        LAYOUT.lost_bookie_delay,
        *(LAYOUT.check_time(kind) for kind in CheckKind),
    ] == [
        "/ledgers/LAYOUT",
        "/ledgers/INSTANCEID",
        "/ledgers/available",
        "/ledgers/available/readonly",
        "/ledgers/available/10.0.0.1:3181",
        "/ledgers/available/readonly/10.0.0.1:3181",
        "/ledgers/cookies",
        "/ledgers/cookies/10.0.0.1:3181",
        "/ledgers/idgen",
        "/ledgers/idgen-long",
        "/ledgers/idgen-long/HOB-0000000001",
        "/ledgers/underreplication/LAYOUT",
        "/ledgers/underreplication/auditorelection",
        "/ledgers/underreplication/disable",
        "/ledgers/underreplication/lostBookieRecoveryDelay",
        "/ledgers/underreplication/checkallledgersctime",
        "/ledgers/underreplication/placementpolicycheckctime",
        "/ledgers/underreplication/replicascheckctime",
    ]


def test_bindery_nodes_are_below_one_root() -> None:
    ours = BinderyLayout()
    assert [
        ours.membership(BookieId("10.0.0.1:3181")),
        ours.recovery_record(LedgerId(10_001)),
        ours.recovery_record(LedgerId(ID_MAX)),
        ours.recovery_closing(LedgerId(10_001)),
        ours.recovery_cursor("ledger-check"),
        ours.recovery_worker("bookie-1.bookies:3181"),
        ours.recovery_history,
        ours.recovery_pause,
    ] == [
        "/bindery/membership/10.0.0.1:3181",
        "/bindery/recovery/ledgers/1/0000000000000010001",
        "/bindery/recovery/ledgers/922337203685477/9223372036854775807",
        "/bindery/recovery/closings/1/0000000000000010001",
        "/bindery/recovery/cursors/ledger-check",
        "/bindery/recovery/workers/bookie-1.bookies:3181",
        "/bindery/recovery/history",
        "/bindery/recovery/pause",
    ]
    with pytest.raises(BadRequest):
        BinderyLayout("/")


def test_the_layout_text_is_63_bytes_without_a_newline_at_the_end() -> None:
    assert LAYOUT_TEXT == b"2\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1"
    assert len(LAYOUT_TEXT) == 63


@pytest.mark.parametrize("bookie_id", ["readonly", "", "a/b", "a b"])
def test_an_invalid_bookie_id_has_no_path(bookie_id: str) -> None:
    with pytest.raises(BadRequest):
        LAYOUT.bookie(BookieId(bookie_id), read_only=False)
    with pytest.raises(BadRequest):
        LAYOUT.cookie(BookieId(bookie_id))


@pytest.mark.parametrize("root", ["", "/", "ledgers", "/ledgers/", "/a//b"])
def test_an_invalid_root_is_refused(root: str) -> None:
    with pytest.raises(BadRequest):
        LedgersLayout(root)


def test_ancestors_go_from_the_top_down() -> None:
    assert list(ancestors("/a/b/c")) == ["/a", "/a/b"]
    assert list(ancestors("/a")) == []


# --- Pulsar -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("orders", "orders"),
        ("a b", "a+b"),
        ("a/b", "a%2Fb"),
        ("a+b~c", "a%2Bb%7Ec"),
        ("a.b-c*d_e", "a.b-c*d_e"),
        ("größe", "gr%C3%B6%C3%9Fe"),
        ("日本", "%E6%97%A5%E6%9C%AC"),
    ],
)
def test_names_are_encoded_like_form_values(name: str, part: str) -> None:
    assert znode_layout.encode_name(name) == part
    assert znode_layout.decode_name(part) == name


@given(name=st.text(min_size=1, max_size=40).filter(lambda name: name not in (".", "..")))
@settings(deadline=None)
def test_any_name_is_encoded_as_one_legal_path_part_and_decoded(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        with pytest.raises(BadRequest):
            znode_layout.encode_name(name)
        return
    path = znode_layout.managed_ledger(tenant="t", namespace="n", topic=name)
    assert validate_path(path).count("/") == 5
    assert znode_layout.decode_name(path.rsplit("/", 1)[1]) == name


def test_pulsar_paths_are_those_of_pulsar() -> None:
    where = {"tenant": "public", "namespace": "default"}
    assert [
        znode_layout.managed_ledger(**where, topic="my topic"),
        znode_layout.cursor(**where, topic="my topic", subscription="sub/1"),
        znode_layout.bundle_owner(**where, bundle=znode_layout.bundle_name(lower=0x40000000, upper=0x80000000)),
        znode_layout.cluster("c1"),
        znode_layout.tenant_policies("public"),
        znode_layout.namespace_policies(**where),
        znode_layout.local_policies(**where),
        znode_layout.partitioned_topic(**where, topic="p"),
        znode_layout.broker("127.0.0.1:8080"),
    ] == [
        "/managed-ledgers/public/default/persistent/my+topic",
        "/managed-ledgers/public/default/persistent/my+topic/sub%2F1",
        "/namespace/public/default/0x40000000_0x80000000",
        "/admin/clusters/c1",
        "/admin/policies/public",
        "/admin/policies/public/default",
        "/admin/local-policies/public/default",
        "/admin/partitioned-topics/public/default/persistent/p",
        "/loadbalance/brokers/127.0.0.1:8080",
    ]


@pytest.mark.parametrize("name", ["", "a/b", "a b", "..", "größe"])
def test_an_invalid_tenant_or_namespace_has_no_path(name: str) -> None:
    with pytest.raises(BadRequest):
        znode_layout.tenant_policies(name)
    with pytest.raises(BadRequest):
        znode_layout.managed_ledger(tenant="t", namespace=name, topic="x")
