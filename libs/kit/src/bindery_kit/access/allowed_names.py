"""AllowedNames: the names that one role of a service has, as a setting lists them.

| setting       | who has the role                                                            |
|---------------|-----------------------------------------------------------------------------|
| `*`           | everybody whom the port admits                                              |
| `alice, bob`  | clients whose token has the subject, or whose certificate has the name      |
| empty         | nobody                                                                      |

Names are compared exactly: no patterns, no case folding. `*` stands alone, so that a name added to it by mistake does
not seem to restrict anything.
"""

from dataclasses import dataclass
from typing import Final, Self

from bindery_core.errors import BadRequest
from bindery_identity.tokens import SUBJECT_SIZE_MAX, is_subject

EVERYBODY_TEXT: Final = "*"
NAMES_MAX: Final = 10_000
"""Maximum number of names in one setting."""


@dataclass(frozen=True, slots=True)
class AllowedNames:
    """`names`: None stands for everybody."""

    names: frozenset[str] | None

    @classmethod
    def parse(cls, text: str, *, setting: str) -> Self:
        """Return the names in `text`, separated by commas. `setting`: for errors. Raises BadRequest for text that is
        not a name, and for `*` beside names."""
        names = [name.strip() for name in text.split(",") if name.strip()]
        if names == [EVERYBODY_TEXT]:
            return cls(None)
        if EVERYBODY_TEXT in names:
            raise BadRequest(f"{setting} has * beside names: use * for everybody, or only the names")
        if len(names) > NAMES_MAX:
            raise BadRequest(f"{setting} has too many names", found=len(names), names_max=NAMES_MAX)
        for name in names:
            if not is_subject(name):
                raise BadRequest(
                    f"{setting} has a name that no client can have: a name has 1 to {SUBJECT_SIZE_MAX} printable "
                    "characters",
                    name=ascii(name[:100]),
                )
        return cls(frozenset(names))

    @property
    def is_everybody(self) -> bool:
        return self.names is None

    def allows(self, name: str) -> bool:
        return self.names is None or name in self.names


EVERYBODY: Final = AllowedNames(None)
