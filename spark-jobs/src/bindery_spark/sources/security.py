"""How readers show bookies who they are: by files that stand on the machines where they run.

What travels (options, tasks, a run's record) are the files' names; their contents are read where a connection is made.
Environment variables are read where a source is made, that is, in the driver. `bindery_client.security` lists them.
"""

from bindery_client.security import NO_FILES, VARIABLES, SecurityFiles

__all__ = ["NO_FILES", "VARIABLES", "SecurityFiles"]
