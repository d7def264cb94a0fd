"""Tenants, namespaces, policies and permissions.

Any broker answers: these operations do not belong to the owner of a topic.
"""

from typing import Final

from bindery_broker.http.v1.namespaces import namespaces, permissions, policies, tenants

ROUTERS: Final = (tenants.router, namespaces.router, policies.router, permissions.router)
