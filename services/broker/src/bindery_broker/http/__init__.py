"""The HTTP data API: one table of routes, raw ASGI underneath, msgspec for every body.

`schemas` are the bodies and queries, `produce_request` parses what producers send (pure), `exchange` is one request and
its answer, `routes` the table, `handlers_*` what stands behind it, `app` the ASGI entry, `openapi` the document made
from the table, `proxy` the way to a topic's owner.
"""
