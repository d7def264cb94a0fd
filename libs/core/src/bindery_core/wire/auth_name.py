"""Check the name of an authentication plugin as decoded by protobuf."""

from bindery_core.errors import BadRequest


def plugin_name(value: object) -> str:
    """Return the name. Raises BadRequest if it is not UTF-8; protobuf returns such a proto2 string as bytes."""
    if not isinstance(value, str):
        raise BadRequest("the authentication plugin's name is not UTF-8")
    return value
