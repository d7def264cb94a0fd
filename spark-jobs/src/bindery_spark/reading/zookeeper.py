"""Connect a job, and each of its readers, to ZooKeeper with TLS files and credentials.

The driver chooses the files, from the options of a data source or its environment
(`bindery_metadata.stores.zookeeper_access`), and passes their names to the readers, which open them on their own
machines.
"""

import os

from bindery_core.errors import MetadataUnreachable
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_metadata.stores.zookeeper_access import VARIABLES, AccessFiles


def name_of(option: str) -> str:
    """Return the names of an option, for errors."""
    return f"{VARIABLES[option]} (option zookeeper_{option})"


async def connect(zookeeper: str, access: AccessFiles | None = None) -> ZooKeeperStore:
    """Connect to the servers. `access` None: the files that the environment names.

    Raises MetadataUnavailable, and BadRequest if a variable or a file is unusable.
    """
    files = AccessFiles.of(os.environ) if access is None else access
    try:
        return await ZooKeeperStore.connect(zookeeper, access=files.load(name_of))
    except MetadataUnreachable as error:
        if files.ca_file:
            raise
        raise MetadataUnreachable(f"{error}. Servers that require TLS need {name_of('ca_file')}") from error
