"""Bind the sockets on which services listen.

An address that other machines can reach is refused unless the caller passes `insecure`, because requests are not
authenticated by default. A service that authenticates the clients of a port passes `insecure` for that port.

A service binds its socket early, so that the port is known and is not assigned to another process, and listens when it
is ready; until then connections are refused. Two processes can bind the same port while neither listens; the second of
them to listen then fails.
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


def check_bind(host: str, *, insecure: bool, remedy: str = "") -> None:
    """Raise BindRefused for an address that other machines can reach, unless `insecure`.

    `remedy`: how to authenticate the clients of the port, for the error; empty if that is not possible.
    """
    if not insecure and not is_loopback(host):
        authenticate = f"{remedy}, " if remedy else ""
        raise BindRefused(
            f"refusing to listen on {host}, where other machines can connect without authentication; "
            f"use 127.0.0.1, {authenticate}or pass --insecure (..._INSECURE=true) if the network itself is trusted"
        )


def cannot_listen(host: str, port: int, error: OSError) -> BindRefused:
    """Return the error for an address that cannot be bound or listened on, with the cause and the fix."""
    return BindRefused(f"cannot listen on {host}:{port}: {error.strerror or error}; {bind_fix(error)}")


def bind_tcp(host: str, port: int, *, insecure: bool = False, remedy: str = "") -> socket.socket:
    """Return a bound socket that does not listen yet; port 0 takes a free port. Raises BindRefused.

    `remedy`: as of `check_bind`.
    """
    check_bind(host, insecure=insecure, remedy=remedy)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise cannot_listen(host, port, error) from error
    bound = sock.getsockname()[0]
    if is_loopback(host) and not is_loopback(bound):  # a file of hosts or a name server decides what localhost is
        sock.close()
        raise BindRefused(
            f"refusing to listen on {host}, which resolves to {bound}, where other machines can connect; "
            "correct the name in /etc/hosts, or use 127.0.0.1"
        )
    sock.setblocking(False)
    return sock
