"""Names of authentication plugins, as protobuf hands them out."""

from bindery_core.errors import BadRequest


def plugin_name(value: object) -> str:
    """The plugin's name. Raises BadRequest when it is not UTF-8: the runtime gives such a proto2 string as bytes."""
    if not isinstance(value, str):
        raise BadRequest("the authentication plugin's name is not UTF-8")
    return value
