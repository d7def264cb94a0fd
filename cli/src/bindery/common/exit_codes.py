"""Exit codes of every `bindery` command.

| code | name        | meaning                                                              |
|-----:|-------------|----------------------------------------------------------------------|
| 0    | OK          | success                                                              |
| 1    | FAILURE     | the command failed, refused, or found a condition that needs action  |
| 2    | USAGE       | wrong usage: an option or argument is missing or invalid             |
| 3    | DAMAGE      | the command completed and found corruption or differences            |
| 130  | INTERRUPTED | interrupted with Ctrl-C                                              |

`bindery audit` has codes of its own, which `bindery_spark.main` documents.
"""

from typing import Final

OK: Final = 0
FAILURE: Final = 1
USAGE: Final = 2
DAMAGE: Final = 3
INTERRUPTED: Final = 130
