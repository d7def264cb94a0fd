"""Settings: numbers and addresses that a user turns, typed, frozen, each with its reason beside it.

A service declares a `Settings` subclass; its fields come from, first found wins:

1. the command line (`load(BookieSettings, argv, prog="bindery-bookie")`: `--journal-size-max` for `journal_size_max`),
2. the environment (the class's `env_prefix` + the field's name, in capitals),
3. the field's default.

A field whose type is itself a `Settings` subclass is a group: its flags carry the group's name
(`--journal-group-wait-ms-max`), its environment names its own prefix. Secrets (`SecretStr`) are refused on the command
line and masked wherever settings are shown; give the name of a file instead.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import SecretBytes, SecretStr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

SettingsT = TypeVar("SettingsT", bound="Settings")


class Settings(BaseSettings):
    """Base of all settings. Subclasses set `model_config = SettingsConfigDict(env_prefix="BOOKIE_")`; the rest is
    inherited."""

    model_config = SettingsConfigDict(
        frozen=True, use_attribute_docstrings=True, extra="forbid", validate_default=True, env_ignore_empty=True
    )

    def effective(self) -> "list[EffectiveSetting]":
        """Every setting with its value and where that came from, groups flattened (`journal.size_max`), secrets
        masked."""
        return list(_effective(self, prefix=""))


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    name: str
    value: Any
    source: str
    """`default`, `environment NAME` or `argument`."""
    help: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value}  ({self.source})"


def _environment_name(cls: type[Settings], field: str) -> str:
    return (str(cls.model_config.get("env_prefix") or "") + field).upper()


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
        shown = "********" if isinstance(value, SecretStr | SecretBytes) else value
        yield EffectiveSetting(f"{prefix}{name}", shown, source, field.description or "")


def _matches_environment(field: FieldInfo, text: str | None, value: Any) -> bool:
    """Whether `value` is what the environment says: an argument that overrides it differs, or says the same."""
    if not text:
        return False
    if isinstance(value, SecretStr | SecretBytes):
        return str(value.get_secret_value()) == text
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(field.annotation or str)
        return bool(adapter.validate_strings(text) == value)
    except ValidationError:
        return text == str(value)


def load(cls: type[SettingsT], argv: Sequence[str] | None = None, *, prog: str, description: str = "") -> SettingsT:
    """Settings from the command line over the environment over defaults.

    `--print-config` prints every setting with its source and exits 0. A wrong value exits 2 with one line per field
    that names the flag, the environment variable and what is allowed.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description or cls.__doc__)
    parser.add_argument(
        "--print-config",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print all settings with sources, then exit",
    )
    _add_flags(parser, cls, path=())
    given = vars(parser.parse_args(argv))
    print_config = given.pop("print_config", False)
    try:
        settings = cls(**_nest(given))
    except ValidationError as error:
        lines = [_explain(cls, e["loc"], str(e["msg"]), e.get("input")) for e in error.errors()]
        text = [f"{prog}: wrong settings:", *lines, f"  (`{prog} --help` lists them all)", ""]
        sys.stderr.write("\n".join(text))
        raise SystemExit(2) from None
    if print_config:
        for setting in settings.effective():
            sys.stdout.write(f"{setting}\n")
        raise SystemExit(0)
    return settings


def _explain(cls: type[Settings], location: tuple[int | str, ...], message: str, given: Any) -> str:
    """One line for one wrong setting: where it can be set, what is wrong."""
    flag = "--" + "-".join(str(part) for part in location).replace("_", "-")
    owner = cls
    for part in location[:-1]:
        field = owner.model_fields.get(str(part))
        owner = (field and _group_type(field)) or owner
    variable = _environment_name(owner, str(location[-1])) if location else ""
    return f"  {flag} ({variable}): {message[:1].lower()}{message[1:]}, got {given!r}"


def _group_type(field: FieldInfo) -> type[Settings] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Settings) else None


def _base_type(annotation: Any) -> Any:
    """The type inside Optional and Annotated, for choosing how a flag is parsed; pydantic does the real work later."""
    if get_origin(annotation) in (Union, type(int | None)):
        inner = [arg for arg in get_args(annotation) if arg is not type(None)]
        return _base_type(inner[0]) if len(inner) == 1 else str
    return annotation


def _add_flags(parser: argparse.ArgumentParser, cls: type[Settings], *, path: tuple[str, ...]) -> None:
    for name, field in cls.model_fields.items():
        group = _group_type(field)
        if group is not None:
            _add_flags(parser, group, path=(*path, name))
            continue
        base = _base_type(field.annotation)
        if base in (SecretStr, SecretBytes):
            continue
        flag = "--" + "-".join((*path, name)).replace("_", "-")
        default = field.get_default(call_default_factory=False)
        shown = "required" if field.is_required() else f"default {default}"
        text = f"{field.description or name} ({shown}; {_environment_name(cls, name)})".replace("%", "%%")
        common: dict[str, Any] = {"dest": ".".join((*path, name)), "default": argparse.SUPPRESS, "help": text}
        if base is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        elif get_origin(base) in (list, tuple) or base in (list, tuple):
            parser.add_argument(flag, nargs="*", metavar="VALUE", **common)
        else:
            parser.add_argument(flag, metavar=_metavar(base), **common)


def _metavar(base: Any) -> str:
    if base is int or base is float:
        return "N"
    if isinstance(base, type) and issubclass(base, Path):
        return "PATH"
    if isinstance(base, type) and issubclass(base, Enum):
        return "{" + ",".join(str(member.value) for member in base) + "}"
    return "VALUE"


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for dotted, value in flat.items():
        *groups, name = dotted.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = value
    return nested
