"""Settings: typed, frozen settings of a service, each with its documentation.

A service declares a `Settings` subclass. The value of a field is the first of:

1. the command line (`load(BookieSettings, argv, prog="bindery-bookie")`: `--journal-size-max` for `journal_size_max`),
2. the environment (the class's `env_prefix` + the field's name, in capitals),
3. the field's default.

    class BookieSettings(Settings):
        model_config = SettingsConfigDict(env_prefix="BOOKIE_")

        port: Annotated[int, Ge(0), Le(65535)] = 3181
        \"\"\"Port of the ledger protocol.\"\"\"

        journal: JournalSettings = group(JournalSettings)

        @check
        def _consistent(self) -> None: ...

A field whose type is itself a `Settings` subclass is a group: the group's name is part of its flags
(`--journal-group-wait-ms-max`), and its class has its own environment prefix. Secrets (`SecretStr`) are rejected on the
command line and masked in all output; use a setting that names a file instead. `setting_values` lists the types and
bounds. Members called `model_...` have the meaning that they have in pydantic, which is not used because its import
takes as long as all other imports of a bookie together.
"""

import argparse
import ast
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn, Self, TypedDict, TypeVar, cast, dataclass_transform

from bindery_core.errors import BadRequest

from bindery_kit.configuration.bounds import Bound
from bindery_kit.configuration.setting_values import SecretStr, ValueType
from bindery_kit.observability import last_words
from bindery_kit.observability.logs import get_logger

__all__ = [
    "EffectiveSetting",
    "Problem",
    "SecretStr",
    "Settings",
    "SettingsConfigDict",
    "WrongSettings",
    "check",
    "descriptions",
    "group",
    "load",
    "unknown_variables",
    "warn_of_unknown_variables",
]

SettingsT = TypeVar("SettingsT", bound="Settings")
CheckT = TypeVar("CheckT", bound=Callable[[Any], None])

_SERVICE_LINK: Final = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR))", re.ASCII
)
"""Endings of the variables that Kubernetes sets for each Service of the namespace, after the name of the Service."""
_LINK_VALUE: Final = re.compile(r"(tcp|udp|sctp)://")
"""Values of such variables with other endings."""
_CHECK_MARK: Final = "_checks_settings"

log = get_logger(__name__)


class SettingsConfigDict(TypedDict, total=False):
    """Options of a `Settings` subclass."""

    env_prefix: str
    """Prefix of each field's name in the environment. The case of variables is ignored; so are empty values."""


class _Missing(Enum):
    """Marker for a field without a default."""

    MISSING = "required"


class _GroupDefault:
    def __init__(self, cls: "type[Settings]") -> None:
        self.cls = cls


def group(cls: type[SettingsT]) -> SettingsT:
    """Return the default of a field that is a group. Each object has its own group, read from the environment."""
    return cast(SettingsT, _GroupDefault(cls))


def check(method: CheckT) -> CheckT:
    """Mark a method of a `Settings` subclass as a check, which is called when all fields are valid.

    A ValueError that it raises is reported as a wrong setting. The first error ends the checks.
    """
    setattr(method, _CHECK_MARK, True)
    return method


@dataclass(frozen=True)
class SettingField:
    """One field of a `Settings` subclass, as declared."""

    name: str
    default: Any
    """The declared default, or a marker if there is none."""
    value_type: ValueType | None
    """None for a group."""
    group: "type[Settings] | None" = None

    @property
    def is_required(self) -> bool:
        return self.default is _Missing.MISSING

    @property
    def bounds(self) -> tuple[Bound, ...]:
        return () if self.value_type is None else self.value_type.bounds


@dataclass(frozen=True)
class Problem:
    """One wrong setting. `location`: the names of its groups, then its own name; for a check only the groups."""

    location: tuple[str, ...]
    message: str
    given: Any = None

    def __str__(self) -> str:
        return f"{'.'.join(self.location)}: {self.message}" if self.location else self.message


class WrongSettings(BadRequest, ValueError):
    """All wrong settings together."""

    code = "wrong_settings"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, problems)))


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Settings:
    """Base of all settings. Subclasses set `model_config = SettingsConfigDict(env_prefix="BOOKIE_")`.

    Each object reads the environment when it is created. Values are text there, so fields cannot be lists.
    """

    model_config = SettingsConfigDict()
    model_fields: ClassVar[Mapping[str, SettingField]] = {}
    _checks: ClassVar[tuple[str, ...]] = ()
    _fields_set: frozenset[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = {
            name: _declared(cls, name, annotation)
            for name, annotation in inspect.get_annotations(cls).items()
            if not name.startswith("_")
        }
        cls.model_fields = {**cls.model_fields, **own}
        marked = [name for name, value in vars(cls).items() if hasattr(value, _CHECK_MARK)]
        cls._checks = (*cls._checks, *(name for name in marked if name not in cls._checks))

    def __init__(self, **given: Any) -> None:
        """Raises WrongSettings. A group may be given as a mapping."""
        self._fill({**_from_environment(type(self)), **given})

    def _fill(self, given: Mapping[str, Any]) -> None:
        fields = type(self).model_fields
        problems = [Problem((name,), "no such setting", given[name]) for name in given if name not in fields]
        for name, field in fields.items():
            try:
                vars(self)[name] = _value(field, given.get(name, field.default))
            except WrongSettings as error:
                problems += (Problem((name, *one.location), one.message, one.given) for one in error.problems)
            except ValueError as error:
                value = given.get(name)
                problems.append(Problem((name,), f"{error}{_link_hint(value)}", value))
        if problems:
            raise WrongSettings(problems)
        vars(self)["_fields_set"] = frozenset(given)
        try:
            for method in self._checks:
                getattr(self, method)()
        except WrongSettings:
            raise
        except ValueError as error:
            raise WrongSettings([Problem((), str(error))]) from error

    @property
    def model_fields_set(self) -> frozenset[str]:
        """Names of the fields that an argument or the environment set; the others have their defaults."""
        return self._fields_set

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        """Return a copy with other values, which are not checked."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **update, _fields_set=self._fields_set.union(update))
        return copy

    def with_defaults(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with `values` for fields that were not set. They count as defaults. Raises WrongSettings."""
        copy = object.__new__(type(self))
        copy._fill(dict(self) | {name: value for name, value in values.items() if name not in self._fields_set})
        vars(copy)["_fields_set"] = self._fields_set
        return copy

    def effective(self) -> "list[EffectiveSetting]":
        """Return every setting with its value and source: groups flattened (`journal.size_max`), secrets masked."""
        return list(_effective(self, prefix=""))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"settings cannot be changed: {type(self).__name__}.{name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"settings cannot be changed: {type(self).__name__}.{name}")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values in the order of declaration."""
        return ((name, getattr(self, name)) for name in type(self).model_fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and type(self) is type(other) and dict(self) == dict(other)

    def __hash__(self) -> int:
        return hash((type(self), *self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self)})"


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """One setting with its current value. `name`: with the names of its groups, such as `journal.size_max`."""

    name: str
    value: Any
    source: str
    """`default`, `environment NAME` or `argument`."""

    def __str__(self) -> str:
        return f"{self.name} = {self.value}  ({self.source})"


def descriptions(cls: type[Settings]) -> dict[str, str]:
    """Return the docstrings of fields by field name; fields without one are missing.

    They are parsed from the source code on each call, which takes milliseconds. Empty if there is no source code.
    """
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not issubclass(owner, Settings):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        except (OSError, SyntaxError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                match text:
                    case ast.Expr(ast.Constant(str() as words)):
                        found[field.target.id] = inspect.cleandoc(words)
    return found


def _declared(cls: type[Settings], name: str, annotation: Any) -> SettingField:
    """Return the declared field. Raises TypeError for an unsupported type."""
    default = vars(cls).get(name, _Missing.MISSING)
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        if not isinstance(default, _GroupDefault) or default.cls is not annotation:
            raise TypeError(f"{cls.__name__}.{name} needs the default group({annotation.__name__})")
        return SettingField(name, default, None, annotation)
    return SettingField(name, default, ValueType.of(annotation))


def _value(field: SettingField, given: Any) -> Any:
    """Return the value of a field. Raises ValueError with the allowed values."""
    if given is _Missing.MISSING:
        raise ValueError("must be given")
    if field.group is None:
        assert field.value_type is not None
        return field.value_type.read(given)
    if isinstance(given, field.group):
        return given
    if isinstance(given, _GroupDefault):
        return field.group()
    if isinstance(given, Mapping):
        return field.group(**given)
    raise ValueError(f"must be {field.group.__name__}")


def _link_hint(given: Any) -> str:
    if not isinstance(given, str) or not _LINK_VALUE.match(given):
        return ""
    return " (Kubernetes sets such a variable for a Service of that name; set enableServiceLinks: false in the pod)"


def _from_environment(cls: type[Settings]) -> dict[str, str]:
    environment = {name.upper(): value for name, value in os.environ.items() if value}
    names = {name: _environment_name(cls, name) for name, field in cls.model_fields.items() if field.group is None}
    return {name: environment[variable] for name, variable in names.items() if variable in environment}


def _environment_name(cls: type[Settings], field: str) -> str:
    return (cls.model_config.get("env_prefix", "") + field).upper()


def _effective(settings: Settings, *, prefix: str) -> Iterator[EffectiveSetting]:
    environment = {name.upper(): value for name, value in os.environ.items()}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, Settings):
            yield from _effective(value, prefix=f"{prefix}{name}.")
            continue
        variable = _environment_name(type(settings), name)
        if name not in settings.model_fields_set:
            source = "default"
        elif _matches_environment(field, environment.get(variable), value):
            source = f"environment {variable}"
        else:
            source = "argument"
        yield EffectiveSetting(f"{prefix}{name}", str(value) if isinstance(value, SecretStr) else value, source)


def _matches_environment(field: SettingField, text: str | None, value: Any) -> bool:
    """Return whether `value` equals the value in the environment. If not, an argument has overridden it."""
    if not text or field.value_type is None:
        return False
    try:
        return bool(field.value_type.read(text) == value)
    except ValueError:
        return False


def load(cls: type[SettingsT], argv: Sequence[str] | None = None, *, prog: str, description: str = "") -> SettingsT:
    """Return the settings from the command line, the environment and the defaults.

    `--print-config` prints every setting with its source and exits with 0. Wrong values exit with 2 and one line per
    field with the flag, the environment variable and the allowed values.
    """
    parser = _Parser(prog=prog, description=description or cls.__doc__)
    parser.add_argument(
        "--print-config",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print all settings with sources, then exit",
    )
    words = sys.argv[1:] if argv is None else argv
    _add_flags(parser, cls, path=(), describe=not {"-h", "--help"}.isdisjoint(words))
    given = vars(parser.parse_args(argv))
    print_config = given.pop("print_config", False)
    try:
        settings = cls(**_nest(given))
    except WrongSettings as error:
        lines = [_explain(cls, problem) for problem in error.problems]
        sys.stderr.write("\n".join((f"{prog}: wrong settings:", *lines, "")))
        last_words.say(prog, f"wrong settings: {'; '.join(map(str.strip, lines))}; `{prog} --help` lists them all")
        raise SystemExit(2) from None
    if print_config:
        for setting in settings.effective():
            sys.stdout.write(f"{setting}\n")
        raise SystemExit(0)
    return settings


class _Parser(argparse.ArgumentParser):
    """A parser that reports errors as services report their ends (`last_words`)."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        last_words.say(self.prog, f"{message}; `{self.prog} --help` lists all options")
        raise SystemExit(2)


def warn_of_unknown_variables(prefix: str, *settings: type[Settings]) -> None:
    """Log a warning for each name in the environment that begins with `prefix` and is not a setting.

    Without the warning, a misspelled name would be ignored silently.
    """
    for name, nearest in unknown_variables(prefix, *settings).items():
        hint = f"did you mean {nearest}?" if nearest else "no setting has a similar name"
        log.warning("unknown_setting", variable=name, reason=f"{name} is not a setting and has no effect; {hint}")


def unknown_variables(prefix: str, *settings: type[Settings]) -> dict[str, str | None]:
    """Return the names in the environment that begin with `prefix` and are not settings.

    The value of each is the setting with the most similar name, or None.
    """
    known = {name for cls in settings for name in _environment_names(cls)}
    unknown = sorted(name for name, value in os.environ.items() if value and name.upper().startswith(prefix))
    unknown = [name for name in unknown if name.upper() not in known and not _is_service_link(name, prefix)]
    if not unknown:
        return {}
    from difflib import get_close_matches  # rarely needed

    ends = {name.removeprefix(prefix): name for name in known}  # the common prefix would make all names similar
    near = {name: get_close_matches(name.upper().removeprefix(prefix), ends, n=1) for name in unknown}
    return {name: ends[found[0]] if found else None for name, found in near.items()}


def _is_service_link(name: str, prefix: str) -> bool:
    """Return whether Kubernetes set the variable for a Service whose name begins like the prefix."""
    return bool(_SERVICE_LINK.fullmatch(name.removeprefix(prefix)) or _LINK_VALUE.match(os.environ[name]))


def _environment_names(cls: type[Settings]) -> Iterator[str]:
    for name, field in cls.model_fields.items():
        if field.group is None:
            yield _environment_name(cls, name)
        else:
            yield from _environment_names(field.group)


def _explain(cls: type[Settings], problem: Problem) -> str:
    """Return one line for a wrong setting: its flag and environment variable, and what is wrong."""
    owner, field = cls, None
    for part in problem.location:
        owner = (field and field.group) or owner
        field = owner.model_fields.get(part)
    if field is None or field.group is not None:
        return f"  {problem}"  # a check, whose message names the settings
    flag = "--" + "-".join(problem.location).replace("_", "-")
    given = "" if field.value_type and field.value_type.base is SecretStr else f", got {problem.given!r}"
    return f"  {flag} ({_environment_name(owner, field.name)}): {problem.message}{given}"


def _add_flags(parser: argparse.ArgumentParser, cls: type[Settings], *, path: tuple[str, ...], describe: bool) -> None:
    """Add a flag per field. `describe`: with help texts, which are slow to find."""
    texts = descriptions(cls) if describe else {}
    for name, field in cls.model_fields.items():
        if field.group is not None:
            _add_flags(parser, field.group, path=(*path, name), describe=describe)
            continue
        assert field.value_type is not None
        base = field.value_type.base
        if base is SecretStr:
            continue
        flag = "--" + "-".join((*path, name)).replace("_", "-")
        shown = "required" if field.is_required else f"default {field.default}"
        text = f"{texts.get(name, name)} ({shown}; {_environment_name(cls, name)})".replace("%", "%%")
        common: dict[str, Any] = {"dest": ".".join((*path, name)), "default": argparse.SUPPRESS, "help": text}
        if base is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        else:
            parser.add_argument(flag, metavar=_metavar(base), **common)


def _metavar(base: Any) -> str:
    if base is int or base is float:
        return "N"
    if issubclass(base, Path):
        return "PATH"
    if issubclass(base, Enum):
        return "{" + ",".join(str(member.value) for member in base) + "}"
    return "VALUE"


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for dotted, value in flat.items():
        *groups, name = dotted.split(".")
        place = nested
        for part in groups:
            place = place.setdefault(part, {})
        place[name] = value
    return nested
