"""HttpSettings: who may call an HTTP port, and how much its clients may make the process hold."""

from typing import Annotated

from bindery_kit.configuration.bounds import Ge, Gt, Le
from bindery_kit.configuration.settings import Settings, SettingsConfigDict, group
from bindery_kit.configuration.tls_settings import HttpTlsSettings

KIB = 1024
MIB = 1024 * KIB


class HttpSettings(Settings):
    """Checks and limits of an HTTP port. They apply to all clients, authenticated or not."""

    model_config = SettingsConfigDict(env_prefix="BINDERY_HTTP_")

    hosts: str = ""
    """Host names under which clients reach this port, separated by commas; `*.example.com` stands for every name below
    example.com. Requests for other hosts get 403, which stops web pages that make their own name resolve to this
    machine. Always allowed: loopback, the address it listens on, this machine's name and the advertised name, and, if
    other machines can connect, every IP address."""

    origins: str = ""
    """Origins of other web sites whose pages may call this port, as `https://console.example.com`, separated by commas.
    Pages of all other sites get 403."""

    connections_max: Annotated[int, Ge(1), Le(100_000)] = 5000
    """Maximum number of open connections, and at most half of the limit of open files. Each takes about 30 KiB while
    its request waits. At the limit, the connection that has been idle longest is closed."""

    connections_per_address_max: Annotated[int, Ge(0), Le(100_000)] = 0
    """Maximum number of open connections of one client address; an IPv6 network of 64 bits counts as one address. 0:
    half of `connections_max`. Set it to `connections_max` if all clients come through one proxy."""

    heads_size_max: Annotated[int, Ge(64 * KIB), Le(65536 * MIB)] = 8 * MIB
    """Maximum bytes of incomplete request heads, and of heads above 4 KiB of requests in progress, over all
    connections. Above it, the connection that has held its bytes longest is closed with 429."""

    bodies_size_max: Annotated[int, Ge(64 * KIB), Le(65536 * MIB)] = 64 * MIB
    """Maximum bytes of request bodies over all connections, until the service has taken them completely. Above it, the
    one that has been arriving longest is ended with 429."""

    unread_size_max: Annotated[int, Ge(256 * KIB), Le(65536 * MIB)] = 96 * MIB
    """Maximum bytes of responses that clients have not read, over all connections, counting 64 KiB of the system's
    buffer for each. Above it, the connection that has left its responses unread longest is closed."""

    head_timeout_s: Annotated[float, Gt(0), Le(3600)] = 30.0
    """Maximum seconds until a request head is complete. Idle connections are closed after 75 s."""

    transfer_grace_s: Annotated[float, Gt(0), Le(3600)] = 30.0
    """Seconds that any request body, and the reading of any response, may take. Beyond it, `transfer_rate_min`
    applies."""

    transfer_rate_min: Annotated[float, Gt(0), Le(1024 * MIB)] = 16 * KIB
    """Minimum bytes per second, in the mean, at which a request body must arrive and a response must be read. Slower
    bodies get 408; connections with unread responses are closed."""

    tls: HttpTlsSettings = group(HttpTlsSettings)
    """TLS on the HTTP port."""


class AdminHttpSettings(HttpSettings):
    """The same, with the defaults of a port for operators and monitoring."""

    connections_max: Annotated[int, Ge(1), Le(100_000)] = 250
    """Maximum number of open connections, and at most half of the limit of open files: of operators and monitoring. At
    the limit, the connection that has been idle longest is closed."""

    heads_size_max: Annotated[int, Ge(64 * KIB), Le(65536 * MIB)] = 2 * MIB
    """Maximum bytes of incomplete request heads, and of heads above 4 KiB of requests in progress, over all
    connections. Above it, the connection that has held its bytes longest is closed with 429."""

    bodies_size_max: Annotated[int, Ge(64 * KIB), Le(65536 * MIB)] = 2 * MIB
    """Maximum bytes of request bodies over all connections, until the service has taken them completely. Above it, the
    one that has been arriving longest is ended with 429."""

    unread_size_max: Annotated[int, Ge(256 * KIB), Le(65536 * MIB)] = 8 * MIB
    """Maximum bytes of responses that clients have not read, over all connections, counting 64 KiB of the system's
    buffer for each. Above it, the connection that has left its responses unread longest is closed."""
