"""Connect a job, and each of its readers, to ZooKeeper with the TLS files and credentials of the environment.

The variables are those of `bindery_metadata.stores.zookeeper_access`. Executors get those of the driver; the files must
exist at the same paths there.
"""

import os
from collections.abc import Mapping

from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_metadata.stores.zookeeper_access import VARIABLES, AccessFiles


async def connect(zookeeper: str) -> ZooKeeperStore:
    """Connect to the servers. Raises MetadataUnavailable, and BadRequest if a variable or a file is unusable."""
    return await ZooKeeperStore.connect(zookeeper, access=AccessFiles.of(os.environ).load())


def executor_conf(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of Spark with which executors get the variables that are set in `environment`."""
    return {
        f"spark.executorEnv.{variable}": environment[variable]
        for variable in VARIABLES.values()
        if environment.get(variable)
    }
