"""Turns a settings model into a command line and a TOML file that name the same things.

A flag is declared once, as a field of a pydantic model: its name, type, default and help. From that come
`--max-num-seqs` on the command line, `max_num_seqs` in the file, the text of `--help` and the check of the
value. Precedence: command line, then file, then default.

Why argparse and not a library of the prettier kind: workers and coordinator share these flags, `common` may
import the standard library and pydantic, and one declaration per flag is worth more than colours in --help.
"""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from common.errors import BadConfiguration

Settings = TypeVar("Settings", bound=BaseModel)

GROUPS = (
    "pools", "model", "HTTP", "TLS", "CORS", "HTTP limits", "engine", "cache", "scheduling", "liveness", "network",
    "process", "service", "arrivals", "prompts and answers", "length of a run", "what is measured", "results",
    "several runs",
)  # fmt: skip
"""Order of the groups in --help."""

# How alike two names are when one may be a slip of the other: --prot and --port, but not pools and control.
NEAR = 0.6

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def flag(
    default: Any,
    help: str,
    group: str,
    *,
    metavar: str | None = None,
    hidden: bool = False,
    several: bool = False,
    **limits: Any,
) -> Any:
    """A field of a settings model that is also a flag. `limits` are pydantic's: ge, gt, le …

    `several`: one use of the flag takes all the values that follow it, as in `--goodput ttft:500 itl:75`.
    """
    extra: JsonDict = {"group": group, "metavar": metavar, "hidden": hidden, "several": several}
    return Field(default, description=help, json_schema_extra=extra, **limits)


def from_variable(name: str, *, default: Any) -> Any:
    """A field whose value comes from the environment variable `name`: no flag, and no key of the file."""
    extra: JsonDict = {"group": None, "metavar": None, "hidden": True, "variable": name}
    return Field(default, json_schema_extra=extra)


def parse_bytes(value: object) -> object:
    """'2GiB' → 2147483648; anything that is no such text is left for pydantic to judge."""
    if isinstance(value, str) and (parts := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)):
        unit = parts[2].lower()
        unit = unit if unit in _UNITS else unit.removesuffix("b")
        if unit not in _UNITS:
            raise ValueError("expected a number of bytes such as 512MiB or 2GiB")
        return int(float(parts[1]) * _UNITS[unit])
    return value


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def visible_fields(model: type[BaseModel]) -> set[str]:
    """Fields that a person may set."""
    return {name for name, info in model.model_fields.items() if not _extra(info)["hidden"]}


def parse(
    model: type[Settings],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    file_keys: Iterable[str],
    values: dict[str, Any] | None = None,
) -> Settings:
    """Settings from a command line and the `--config` it names. `values` come before the file's.

    `file_keys` are all keys that the file may hold: one file describes a whole cluster, so those of other
    commands are passed over. Raises BadConfiguration with one line that names the flag.
    """
    parser = build_parser(model, prog, description)
    given = vars(parser.parse_args(list(argv)))
    config: str | None = given.pop("config", None)
    merged = dict(values or {})
    in_file: dict[str, Any] = {}
    if config is not None:
        in_file = read_file(Path(config), {*file_keys, *visible_fields(model)})
        for key, value in in_file.items():
            fault = _toml_fault(key, value, model.model_fields[key]) if key in model.model_fields else ""
            if fault:
                raise BadConfiguration(f"--config {config}: {fault}")
        merged |= {key: value for key, value in in_file.items() if key in model.model_fields}
        if "config_file" in model.model_fields:
            merged["config_file"] = str(Path(config).absolute())
    try:
        return model.model_validate(merged | given)
    except ValidationError as error:
        of_file = in_file.keys() - given.keys()
        message, field = _one_line(model, error, of_file)
        raise BadConfiguration(f"--config {config}: {message}" if field in of_file else message) from None


def read_file(path: Path, known: set[str]) -> dict[str, Any]:
    """Top-level keys of a TOML file; raises BadConfiguration on one that is not in `known`."""
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise BadConfiguration(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfiguration(f"--config {path}: not TOML: {error}") from error
    for key in found:
        if key not in known and (why := _not_here(key)):
            raise BadConfiguration(f"--config {path}: {key}: {why}")
        if key not in known:
            raise BadConfiguration(f"--config {path}: unknown key {key!r}{_nearest(key, known)}")
    return found


def _toml_fault(name: str, value: Any, info: FieldInfo) -> str:
    """What is wrong with the kind of a value in a file, "" if nothing is. On a command line all is text, in TOML a
    number and a text are two things: taken for each other, a slip in one key would pass and in another would not."""
    rows = _rows_of(info)
    if rows is not None:
        return _table_fault(name, value, rows)
    kinds = {kind for kind in get_args(info.annotation) or (info.annotation,) if kind is not type(None)}
    if not kinds <= {bool, int, float} or any(isinstance(m, BeforeValidator) for m in info.metadata):
        return ""
    if bool in kinds:
        wrong, wanted = not isinstance(value, bool), "true or false, without quotes"
    else:
        wrong, wanted = isinstance(value, str | bool), "a number, without quotes"
    return f"{name}: expected {wanted} (got {value!r})" if wrong else ""


def _table_fault(name: str, value: Any, rows: type[BaseModel]) -> str:
    if not isinstance(value, dict):
        return f"{name}: expected tables, each under a head of its own such as [{name}.NAME] (got {value!r})"
    for row, keys in value.items():
        place, known = f"{name}.{row}", rows.model_fields
        if not isinstance(keys, dict):
            key = f"; {row} is a key of one, and stands under [{name}.NAME]" if row in known else ""
            return f"{place}: expected a table, which begins with [{place}] (got {keys!r}){key}"
        faults = (_toml_fault(f"{place}.{key}", keys[key], known[key]) for key in keys if key in known)
        if fault := next(filter(None, faults), ""):
            return fault
    return ""


def to_argv(settings: BaseModel, fields: Iterable[str]) -> list[str]:
    """The command line that gives a child these fields, defaults included: a file must not win over them."""
    argv: list[str] = []
    for name in sorted(fields):
        value = getattr(settings, name)
        if value is None:
            continue
        if isinstance(value, bool):
            argv.append(flag_name(name) if value else flag_name("no_" + name))
        else:
            for one in value if isinstance(value, tuple) else (value,):
                argv.append(f"{flag_name(name)}={one}")
    return argv


# --- the parser ------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Raises instead of leaving, and knows what a person may have meant."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        for arg in unknown:
            name = arg.split("=")[0]
            known = {option for action in self._actions for option in action.option_strings}
            if name.startswith("-") and (why := _not_here(name)):
                self.error(f"{name}: {why}")
            what = "unknown flag" if name.startswith("-") else "unexpected argument"
            self.error(f"{what} {name}{_nearest(name, known)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        raise BadConfiguration(f"{message} ({self.prog} --help lists what there is)")


_NOT_HERE = {
    "tensor": "a model is not split over processes or devices here, each worker holds all of it",
    "pipeline": "a model is not split over processes or devices here, each worker holds all of it",
    "data": "more workers are what there is: kvferry serve --prefill N --decode M",
}
"""First words of flags that other servers have for parallelism, and what to know instead."""


def _not_here(name: str) -> str:
    """Why a flag that other servers have is none of ours; "" where nothing is known of it."""
    spelled = name.strip("-").replace("_", "-")
    first, _, rest = {"tp": "tensor-parallel", "pp": "pipeline-parallel", "dp": "data-parallel"}.get(
        spelled.removesuffix("-size"), spelled
    ).partition("-")
    return _NOT_HERE.get(first, "") if rest.startswith(("parallel", "model-parallel")) else ""


def build_parser(model: type[BaseModel], prog: str, description: str) -> argparse.ArgumentParser:
    """A parser that yields only the flags that were given, as text: pydantic judges the values."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [flags]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
    )
    parser.add_argument(
        "--config", metavar="FILE.toml", help="settings from a TOML file: the flags with underscores as keys"
    )
    for title in GROUPS:
        group = parser.add_argument_group(title)
        for name, info in model.model_fields.items():
            extra = _extra(info)
            if extra["group"] == title:  # no group: a table of the file, such as tiers
                group.add_argument(flag_name(name), **_argument(name, info, extra))
    return parser


def _extra(info: FieldInfo) -> dict[str, Any]:
    extra = info.json_schema_extra
    return extra if isinstance(extra, dict) else {"group": None, "metavar": None, "hidden": True}


def _argument(name: str, info: FieldInfo, extra: dict[str, Any]) -> dict[str, Any]:
    argument: dict[str, Any] = {"dest": name}
    argument["help"] = argparse.SUPPRESS if extra["hidden"] else _help(info)
    if info.annotation is bool:
        return argument | {"action": argparse.BooleanOptionalAction}
    argument["metavar"] = extra["metavar"] or name.split("_")[-1].upper()
    if extra.get("several"):
        return argument | {"action": "extend", "nargs": "+"}
    if get_origin(info.annotation) is tuple:
        return argument | {"action": "append"}
    if get_origin(info.annotation) is Literal:
        argument["metavar"] = "{" + ",".join(get_args(info.annotation)) + "}"
    return argument


def _help(info: FieldInfo) -> str:
    text = (info.description or "").replace("%", "%%")
    default = info.get_default(call_default_factory=True)
    if default is None or default == () or default == "":
        return text
    return f"{text} (default: {_shown(default)})"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if isinstance(value, int) and value >= size and value % size == 0:
            return f"{value // size}{unit}"
    return str(value)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=NEAR)
    return f": did you mean {close[0]}?" if close else ""


def _one_line(model: type[BaseModel], error: ValidationError, of_file: Set[str]) -> tuple[str, str]:
    """What is wrong first, and the field it is about (no such name when about several). `of_file`: fields set
    by a file."""
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"]]
    message = first["msg"].removeprefix("Value error, ")
    if not place:  # of several at once: a message that begins with a key is about that
        return message, message.partition(":")[0].partition(".")[0].partition(" ")[0]
    field = place[0]
    where = ".".join(place) if field in of_file else _source(model, field)
    if first["type"] == "extra_forbidden":
        known = _keys_of_table(model.model_fields[field]) if field in model.model_fields else set()
        return f"unknown key {where!r}{_nearest(place[-1], known)}", field
    got = "" if any(map(_is_secret, place)) else f" (got {first['input']!r})"
    return f"{where}: {message[:1].lower()}{message[1:]}{got}", field


def _source(model: type[BaseModel], field: str) -> str:
    """Where a person set a field that is in no file."""
    variable = _extra(model.model_fields[field]).get("variable") if field in model.model_fields else None
    return str(variable or flag_name(field))


def _is_secret(field: str) -> bool:
    return field.startswith("api_key")


def _keys_of_table(info: FieldInfo) -> set[str]:
    """Keys of the rows of a table of tables: those of Tier for `tiers: dict[str, Tier]`."""
    rows = _rows_of(info)
    return set() if rows is None else set(rows.model_fields)


def _rows_of(info: FieldInfo) -> type[BaseModel] | None:
    """What the rows of a table of tables are; None where a field is no such table."""
    if get_origin(info.annotation) is not dict:
        return None
    row = get_args(info.annotation)[1]
    return row if isinstance(row, type) and issubclass(row, BaseModel) else None
