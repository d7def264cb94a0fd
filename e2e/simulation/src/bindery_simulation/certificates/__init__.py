"""Certificates for tests, made by `make.sh`. Their keys are public: never trust them.

| file      | names                        | signed by | for                                            |
|-----------|------------------------------|-----------|------------------------------------------------|
| bookie    | CN bookie, localhost, 127... | ca        | a server on the loopback                       |
| client    | CN broker, broker.test       | ca        | an authorized client                           |
| guest     | CN guest, guest.test         | ca        | a known client that is not authorized          |
| stranger  | CN broker, broker.test       | other-ca  | a client with the name of `client` and another |
|           |                              |           | CA                                             |
"""

from pathlib import Path
from typing import Final

DIRECTORY: Final = Path(__file__).parent
CA: Final = DIRECTORY / "ca.pem"
"""Certificate of the CA that clients and servers trust."""
OTHER_CA: Final = DIRECTORY / "other-ca.pem"
"""Certificate of the CA of `stranger`."""


def certificate(name: str) -> Path:
    """Return the certificate file of a row of the table."""
    return DIRECTORY / f"{name}.pem"


def key(name: str) -> Path:
    """Return the private key file of a row of the table."""
    return DIRECTORY / f"{name}.key"
