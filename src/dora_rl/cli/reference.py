"""`docs/configuration.md`, made from config.py: every setting with its type, default, limits and meaning.

    python -m dora_rl.cli.reference > docs/configuration.md

A test compares the file with what this makes.
"""

import types
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types as limits
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dora_rl.config import Config

HEAD = """# Configuration

A run is described by one TOML file; `--set section.key=VALUE` changes one setting for one run. A misspelt setting is an
error that names the nearest real one. This page is made from `src/dora_rl/config.py` (`make docs`).
"""


def configuration() -> str:
    """The page."""
    sections = [_section(name, field) for name, field in Config.model_fields.items()]
    return "\n".join([HEAD, *sections])


def _section(name: str, field: FieldInfo) -> str:
    model = next(part for part in _parts(field.annotation) if isinstance(part, type) and issubclass(part, BaseModel))
    about = [line.strip() for line in (model.__doc__ or "").split("\n\n")[0].splitlines()]
    lines = [f"## [{name}]", ""]
    if about and model.__doc__ is not BaseModel.__doc__:
        lines += [" ".join(about), ""]
    lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
    lines += [_setting(key, one) for key, one in model.model_fields.items()]
    return "\n".join([*lines, ""])


def _setting(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else _value(field.default)
    meaning = " ".join((field.description or "").split()).replace("|", "\\|")
    return f"| `{name}` | {_type(field)} | {default} | {meaning} |"


def _type(field: FieldInfo) -> str:
    return " ".join([_kind(field.annotation), *(filter(None, map(_limit, field.metadata)))])


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{_value(choice).strip('`')}`" for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {_kind(get_args(annotation)[0])}"
    parts = _parts(annotation)
    if len(parts) > 1:
        return _kind(next(part for part in parts if part is not type(None)))
    return {int: "integer", float: "number", str: "text", bool: "true or false"}[annotation]


def _parts(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _limit(limit: Any) -> str:
    for kind, text in ((limits.Ge, "from"), (limits.Gt, "above"), (limits.Le, "to"), (limits.Lt, "below")):
        if isinstance(limit, kind):
            return f"{text} {getattr(limit, kind.__name__.lower()):g}"
    return f"at least {limit.min_length}" if isinstance(limit, limits.MinLen) else ""


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(_value(one).strip('`') for one in value)}]`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    print(configuration(), end="")
