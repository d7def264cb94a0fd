"""Certificates for tests, made by `make.sh`. Their keys are public: never trust them.

| file      | names                        | signed by | for                                            |
|-----------|------------------------------|-----------|------------------------------------------------|
| bookie    | CN bookie, localhost, 127... | ca        | a server on the loopback                       |
| client    | CN broker, broker.test       | ca        | an authorized client                           |
| guest     | CN guest, guest.test         | ca        | a known client that is not authorized          |
| stranger  | CN broker, broker.test       | other-ca  | a client with the name of the first, not its CA|
"""

from pathlib import Path
from typing import Final

DIRECTORY: Final = Path(__file__).parent
CA: Final = DIRECTORY / "ca.pem"
OTHER_CA: Final = DIRECTORY / "other-ca.pem"


def certificate(name: str) -> Path:
    return DIRECTORY / f"{name}.pem"


def key(name: str) -> Path:
    return DIRECTORY / f"{name}.key"
