"""Parse the Avro schemas in definitions, within limits. The only module that imports the Avro library's parser.

Definitions come from clients. The library parses recursively, and a compatibility check compares each branch of a union
with each branch of the other one; the limits keep both short. Names are not validated, because Pulsar accepts those of
nested Java classes, which contain `$`.
Source: Pulsar StructSchemaDataValidator.
"""

import json
import warnings
from typing import Any, Final

import avro.errors
import avro.schema

from bindery_broker.errors import InvalidSchema

NODES_MAX: Final = 4_000
"""Maximum number of objects and arrays in a definition."""
UNION_BRANCHES_MAX: Final = 64
"""Maximum number of branches of a union."""
DEPTH_MAX: Final = 64
"""Maximum depth of objects and arrays in a definition. A record inside a record takes three levels."""
_NO_UNIONS: Final = frozenset(("fields", "symbols", "aliases", "default"))
"""Keys of arrays that are no unions."""


def parse(definition: bytes) -> avro.schema.Schema:
    """Return the Avro schema. Raises InvalidSchema."""
    _check_limits(load(definition))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of logical types that Java's library has and this one has not
            return avro.schema.parse(definition.decode(), validate_enum_symbols=False, validate_names=False)
    except (avro.errors.AvroException, AttributeError, KeyError, LookupError, TypeError, ValueError) as error:
        raise InvalidSchema(f"the definition is not an Avro schema: {str(error)[:500]}") from error


def load(definition: bytes) -> Any:
    """Return the JSON value. Raises InvalidSchema."""
    try:
        return json.loads(definition)
    except (ValueError, RecursionError) as error:
        raise InvalidSchema(f"the definition is not JSON: {str(error)[:200]}") from error


def is_same(one: bytes, other: bytes) -> bool:
    """Return whether two definitions are the same JSON, apart from white space and the order of an object's fields."""
    if one == other:
        return True
    try:
        return bool(load(one) == load(other))
    except (InvalidSchema, RecursionError):
        return False


def _check_limits(content: Any) -> None:
    nodes = 0
    level: list[tuple[str, Any]] = [("type", content)]
    for _ in range(DEPTH_MAX):
        following: list[tuple[str, Any]] = []
        for key, item in level:
            if isinstance(item, dict):
                nodes += 1
                following += item.items()
            elif isinstance(item, list):
                nodes += 1
                if key not in _NO_UNIONS and len(item) > UNION_BRANCHES_MAX:
                    raise InvalidSchema("a union of the definition has too many branches", max=UNION_BRANCHES_MAX)
                following += [("type", one) for one in item]
        if nodes > NODES_MAX:
            raise InvalidSchema("the definition has too many types and fields", max=NODES_MAX)
        if not following:
            return
        level = following
    raise InvalidSchema("the definition is nested too deeply", max=DEPTH_MAX)
