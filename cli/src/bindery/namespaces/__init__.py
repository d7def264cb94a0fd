"""Commands on tenants, namespaces and policies."""
