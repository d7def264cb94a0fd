"""Bind the sockets on which services listen.

An address that other machines can reach is refused unless the caller passes `insecure`, because requests are not
authenticated by default. A service binds its socket early, so that the port is known and is not assigned to another
process, and listens when it is ready; until then connections are refused. Two processes can bind the same port while
neither listens; the second of them to listen then fails.
"""

import ipaddress
import socket

from bindery_core.errors import BinderyError

from bindery_kit.observability.last_words import bind_fix


class BindRefused(BinderyError):
    """The address is not allowed or cannot be bound."""

    code = "bind_refused"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host` (an address or `localhost`)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, *, insecure: bool) -> None:
    """Raise BindRefused for an address that other machines can reach, unless `insecure`."""
    if not insecure and not is_loopback(host):
        raise BindRefused(
            f"refusing to listen on {host}, where other machines can connect without authentication; "
            "use 127.0.0.1, or pass --insecure (..._INSECURE=true) if the network itself is trusted"
        )


def cannot_listen(host: str, port: int, error: OSError) -> BindRefused:
    """Return the error for an address that cannot be bound or listened on, with the cause and the fix."""
    return BindRefused(f"cannot listen on {host}:{port}: {error.strerror or error}; {bind_fix(error)}")


def bind_tcp(host: str, port: int, *, insecure: bool = False) -> socket.socket:
    """Return a bound socket that does not listen yet; port 0 takes a free port. Raises BindRefused."""
    check_bind(host, insecure=insecure)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise cannot_listen(host, port, error) from error
    sock.setblocking(False)
    return sock
