"""Pure machines for the policies of topics: what is due, what is refused and for how long. `topics` executes them.

`accounts` has the limits of clients, tenants and namespaces, which `http` applies.
"""
