"""The HTTP API: a FastAPI application whose hot operations bypass FastAPI's request handling.

`app` is the application and `gate` its outermost layer: request ids, metrics, problems, and the direct call of hot
operations. `route` defines ordinary and hot operations, `exchange` is one request and its answer, `at_owner` runs an
operation on the broker that owns its topic or passes it on (`proxy`), `paths` decodes paths, and `openapi` and `page`
describe the API. `v1` holds the operations. Nothing but `app` imports `v1`.
"""
