"""Roles of an auditor's clients.

| role     | setting                | requests                                                                    |
|----------|------------------------|-----------------------------------------------------------------------------|
| reader   | `admin.reader_roles`   | GET of every route                                                          |
| operator | `admin.operator_roles` | all other methods: they change the recovery of the cluster                  |

A request needs exactly one role: who shall read and change needs both. Without a restriction (`*`) of readers, reading
needs no token. Probes and metrics are not routes, and are always open.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bindery_core.errors import BadRequest
from bindery_kit.access.allowed_names import AllowedNames
from bindery_kit.admin.app import RoleRule
from bindery_kit.admin.http import Route

from bindery_auditor.settings import AdminSettings


def role_rules(admin: AdminSettings, routes: Sequence[Route[Any]]) -> Mapping[tuple[str, str], RoleRule]:
    """Return who may use each route. Raises BadRequest for text that is not names, and for names of clients that no
    token names."""
    rules = {
        role: RoleRule(role=role, setting=setting, allowed=AllowedNames.parse(text, setting=setting))
        for role, setting, text in (
            ("reader", "admin.reader_roles", admin.reader_roles),
            ("operator", "admin.operator_roles", admin.operator_roles),
        )
    }
    for rule in rules.values():
        if not (rule.allowed.is_everybody or admin.keys_file):
            raise BadRequest(
                f"{rule.setting} names clients, which needs signed tokens: set admin.keys_file, or {rule.setting}=*"
            )
    return {(route.method, route.path): rules["operator" if route.is_change else "reader"] for route in routes}
