"""Which roles may do what: Pulsar's permissions, as they are stored in the policies of tenants and namespaces.

`requirements` has the table of operations, `decision` decides by `namespaces.permissions`, `records` keeps
the stored permissions in memory, `access` is what the HTTP API calls.
"""
