"""The token that a client presents: the first line of a file, read again when the file has changed.

A service's file of secrets has one secret per line, each of which is accepted; a client may have the same file and
presents the first one. A change that cannot be used, such as an empty file, leaves the last good token in use.
"""

from bindery_core.errors import BadRequest

from bindery_identity.followed import FollowedFile


class TokenFile(FollowedFile[bytes]):
    """The token in a file. The constructor raises BadRequest if the file cannot be read or contains no token."""

    def __init__(self, path: str) -> None:
        super().__init__(path, first_line, what="the token file")

    def newest(self) -> bytes:
        """Return the token, after reading the file again if it has changed. Blocks for the file system's calls."""
        self.poll()
        return self.value


def first_line(content: bytes) -> bytes:
    """Return the first line that is not blank, without the space around it. Raises BadRequest if there is none."""
    found = next((line.strip() for line in content.splitlines() if line.strip()), b"")
    if not found:
        raise BadRequest("the token file is empty; write the token to its first line")
    return found
