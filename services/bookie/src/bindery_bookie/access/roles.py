"""Roles of a bookie's clients: which role each operation of the ledger port and each route of the HTTP port needs.

| role     | setting               | operations                                                                        |
|----------|-----------------------|-----------------------------------------------------------------------------------|
| client   | `auth.client_roles`   | add, read, fence, LACs, force, free space: what writers and readers of ledgers do |
| recovery | `auth.recovery_roles` | the list of a ledger's entries; contents of entries and passwords over HTTP       |
| admin    | `auth.admin_roles`    | changes over HTTP, and the self-test, which writes a ledger                       |
| none     |                       | AUTH, START_TLS, operations that are not implemented; open GETs, probes, metrics  |

Roles are independent: an operation needs exactly one, so that a setting left at `*` does not undo another one. `WIRE`
and `ROUTES` are the complete tables. The names of a client are those of `access.authentication` (port 3181) and
`bindery_kit.admin.access` (HTTP): the subject of its token, or the name in its certificate.

Without the role, the ledger port answers BookKeeper's EUA (UNAUTHORIZED) in the response of the operation, and its
clients report UnauthorizedAccess; HTTP answers 403. Both do so before they look for the ledger.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bindery_core.wire import messages as m
from bindery_core.wire.messages import Operation, Request
from bindery_kit.access.allowed_names import EVERYBODY, AllowedNames


class Role(enum.StrEnum):
    CLIENT = "client"
    RECOVERY = "recovery"
    ADMIN = "admin"


WIRE: Final[Mapping[Operation, Role | None]] = {
    Operation.ADD_ENTRY: Role.CLIENT,
    Operation.READ_ENTRY: Role.CLIENT,
    Operation.BATCH_READ_ENTRY: Role.CLIENT,
    Operation.WRITE_LAC: Role.CLIENT,
    Operation.READ_LAC: Role.CLIENT,
    Operation.FORCE_LEDGER: Role.CLIENT,
    Operation.GET_BOOKIE_INFO: Role.CLIENT,
    Operation.GET_LIST_OF_ENTRIES_OF_LEDGER: Role.RECOVERY,
    Operation.AUTH: None,
    Operation.START_TLS: None,
    Operation.RANGE_READ_ENTRY: None,
    Operation.RANGE_ADD_ENTRY: None,
}
"""By the numbers of version 3; those of version 2 stand for the same operations."""

OPERATION_OF: Final[Mapping[type[Request], Operation]] = {
    m.AddRequest: Operation.ADD_ENTRY,
    m.ReadRequest: Operation.READ_ENTRY,
    m.BatchReadRequest: Operation.BATCH_READ_ENTRY,
    m.WriteLacRequest: Operation.WRITE_LAC,
    m.ReadLacRequest: Operation.READ_LAC,
    m.ForceLedgerRequest: Operation.FORCE_LEDGER,
    m.BookieInfoRequest: Operation.GET_BOOKIE_INFO,
    m.ListEntriesRequest: Operation.GET_LIST_OF_ENTRIES_OF_LEDGER,
    m.AuthRequest: Operation.AUTH,
    m.StartTlsRequest: Operation.START_TLS,
}
"""`OtherRequest` is missing: it is answered as not implemented, whoever sends it."""

_OPEN: Final = (
    "/heartbeat",
    "/api/v1/config/server_config",
    "/api/v1/bookie/info",
    "/api/v1/bookie/state",
    "/api/v1/bookie/state/readonly",
    "/api/v1/bookie/is_ready",
    "/api/v1/ledger/list",
    "/api/v1/ledger/metadata",
    "/api/v1/bookie/list_bookies",
    "/api/v1/bookie/list_bookie_info",
    "/api/v1/bookie/cluster_info",
    "/api/v1/bookie/last_log_mark",
    "/api/v1/bookie/list_disk_file",
    "/api/v1/bookie/gc",
    "/api/v1/bookie/gc_details",
    "/api/v1/bookie/gc/suspend_compaction",
    "/api/v1/bookie/entry_location_compact",
    "/api/v1/bookie/disks",
    "/api/v1/bookie/gc/state",
    "/api/v1/bookie/gc/logs",
    "/api/v1/bookie/gc/explain",
    "/api/v1/bookie/ledgers",
    "/api/v1/bookie/limbo",
    "/api/v1/bookie/damage",
    "/api/v1/bookie/scrub",
    "/api/v1/bookie/drill",
    "/api/v1/bookie/gc/rollback",
    "/api/v1/autorecovery/status",
    "/api/v1/autorecovery/list_under_replicated_ledger",
    "/api/v1/autorecovery/who_is_auditor",
    "/api/v1/autorecovery/lost_bookie_recovery_delay",
)
"""Paths whose GET needs no role."""
_ADMIN: Final = (
    ("GET", "/api/v1/bookie/sanity"),
    ("PUT", "/api/v1/bookie/state/readonly"),
    ("DELETE", "/api/v1/ledger/delete"),
    ("PUT", "/api/v1/bookie/expand_storage"),
    ("PUT", "/api/v1/bookie/gc"),
    ("PUT", "/api/v1/bookie/gc/suspend_compaction"),
    ("PUT", "/api/v1/bookie/gc/resume_compaction"),
    ("PUT", "/api/v1/bookie/entry_location_compact"),
    ("PUT", "/api/v1/bookie/scrub"),
    ("PUT", "/api/v1/bookie/drill"),
    ("DELETE", "/api/v1/bookie/drill"),
    ("PUT", "/api/v1/bookie/gc/rollback"),
    ("PUT", "/api/v1/autorecovery/status"),
    ("PUT", "/api/v1/autorecovery/trigger_audit"),
    ("PUT", "/api/v1/autorecovery/lost_bookie_recovery_delay"),
    ("PUT", "/api/v1/autorecovery/bookie"),
    ("PUT", "/api/v1/autorecovery/decommission"),
)
ROUTES: Final[Mapping[tuple[str, str], Role | None]] = {
    **{("GET", path): None for path in _OPEN},
    ("GET", "/api/v1/ledger/read"): Role.RECOVERY,
    **dict.fromkeys(_ADMIN, Role.ADMIN),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Who has which role."""

    client: AllowedNames = EVERYBODY
    recovery: AllowedNames = EVERYBODY
    admin: AllowedNames = EVERYBODY

    def of(self, role: Role) -> AllowedNames:
        """Return who has a role."""
        match role:
            case Role.CLIENT:
                return self.client
            case Role.RECOVERY:
                return self.recovery
            case Role.ADMIN:
                return self.admin

    def forbidden_to(self, name: str | None) -> frozenset[type[Request]] | None:
        """Return the requests of the ledger port that a client may not send; None: it may send all.

        `name`: None if the port authenticates nobody; then no role has names.
        """
        if name is None:
            return None
        forbidden = frozenset(
            kind
            for kind, operation in OPERATION_OF.items()
            if (role := WIRE[operation]) is not None and not self.of(role).allows(name)
        )
        return forbidden or None


NO_ROLES: Final = Roles()
"""Everybody has all roles."""
