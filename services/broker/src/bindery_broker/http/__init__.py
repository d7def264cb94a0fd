"""The HTTP data API: a FastAPI application whose hot operations are bare routes.

`app` is the application, `gate` its outermost layer: records, problems, and the hot routes' way around the framework.
`messages`, `topics` and `subscriptions` are the operations; `route` makes both kinds, the ordinary (pydantic `models`,
FastAPI's own handling) and the hot (msgspec `schemas`). `exchange` is one request and its answer, `at_owner` runs an
operation where its topic is owned or passes it on (`proxy`), `paths` are the parameters in them, `openapi` what
FastAPI's document cannot know, `page` that document for people, `produce_request` parses what producers send (pure).
"""
