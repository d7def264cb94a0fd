"""How readers show bookies who they are: by files that stand on the machines where they run.

What travels (options, tasks, a run's record) are the files' names; their contents are read where a connection is made.

| option           | environment variable            | is                                                            |
|------------------|---------------------------------|---------------------------------------------------------------|
| token_file       | BINDERY_CLIENT_TOKEN_FILE       | the token to show to each bookie                              |
| ca_file          | BINDERY_CLIENT_CA_FILE          | who signed the bookies' certificates; empty: no TLS           |
| certificate_file | BINDERY_CLIENT_CERTIFICATE_FILE | the certificate to show                                       |
| key_file         | BINDERY_CLIENT_KEY_FILE         | its key, not encrypted                                        |
| auth_plugin      | BINDERY_CLIENT_PLUGIN           | name of the bookies' authentication (`bindery`)               |
| check_hostname   | BINDERY_CLIENT_CHECK_HOSTNAME   | false: the certificate may name another host than was reached |

An option wins over its variable. Variables are read where a source is made, that is, in the driver.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from bindery_client.security import PLUGIN, ClientSecurity, load_security
from bindery_core.errors import BadRequest

VARIABLES: Final = {
    "token_file": "BINDERY_CLIENT_TOKEN_FILE",
    "ca_file": "BINDERY_CLIENT_CA_FILE",
    "certificate_file": "BINDERY_CLIENT_CERTIFICATE_FILE",
    "key_file": "BINDERY_CLIENT_KEY_FILE",
    "auth_plugin": "BINDERY_CLIENT_PLUGIN",
    "check_hostname": "BINDERY_CLIENT_CHECK_HOSTNAME",
}
"""By option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityFiles:
    """Names of files; empty: none. It pickles, and holds no secret."""

    token_file: str = ""
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    auth_plugin: str = PLUGIN
    check_hostname: bool = True

    @classmethod
    def of(cls, options: Mapping[str, str], environment: Mapping[str, str]) -> "SecurityFiles":
        """`options` by name, empty ones count as not given. Raises BadRequest."""
        told = {name: options.get(name) or environment.get(variable, "") for name, variable in VARIABLES.items()}
        checked = told.pop("check_hostname").lower() or "true"
        if checked not in ("true", "false"):
            raise BadRequest("option check_hostname must be one of true, false", value=checked)
        plugin = told.pop("auth_plugin") or PLUGIN
        return cls(**told, auth_plugin=plugin, check_hostname=checked == "true")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def load(self) -> ClientSecurity:
        """Read the files. Raises BadRequest for those that are no use."""
        return load_security(
            ca_file=self.ca_file or None,
            certificate_file=self.certificate_file or None,
            key_file=self.key_file or None,
            check_hostname=self.check_hostname,
            token_file=self.token_file or None,
            plugin=self.auth_plugin,
        )


NO_FILES: Final = SecurityFiles()
