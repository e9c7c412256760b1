"""Reading configs: YAML files, dotted `key=value` overrides, and one source for field help.

An unknown key is an error that names the nearest known one; every error is reported at once.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from eagle3.config.base import Section
from eagle3.errors import Problem, ProblemsError, problem_error

COMMAND_LINE = "command line"
ConfigT = TypeVar("ConfigT", bound=Section)


def load_config(
    model: type[ConfigT],
    path: str | Path | None,
    overrides: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> ConfigT:
    """Reads a YAML file (if any), applies `a.b=value` overrides (values are YAML) and validates.

    Args:
        defaults: values of keys that neither the file nor an override gives.

    Raises:
        ProblemsError: every unknown key, wrong type and missing field, with the file's name; `command line` for
            what an override says.
    """
    where = COMMAND_LINE if path is None else str(path)
    values: Any = {} if path is None else _read_yaml(Path(path))
    if not isinstance(values, dict):
        raise problem_error(
            where, "config.type", f"holds a {type(values).__name__}, expected a mapping", "see configs/"
        )
    problems = [problem for item in overrides if (problem := _apply_override(values, item)) is not None]
    if problems:
        raise ProblemsError(problems)
    values = {**(defaults or {}), **values}
    return build_config(model, values, where, frozenset(item.partition("=")[0] for item in overrides))


def build_config(
    model: type[ConfigT], values: dict[str, Any], where: str, overridden: frozenset[str] = frozenset()
) -> ConfigT:
    """Validates a mapping that was read from `where`, but for the dotted keys `overridden`; see `load_config`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        details = [(detail, ".".join(map(str, detail["loc"]))) for detail in error.errors()]
        raise ProblemsError(
            _problem(model, detail, key, _place(key, where, overridden)) for detail, key in details
        ) from None


def field_help(model: type[Section], prefix: str = "", required: str = "required") -> Iterator[tuple[str, str, str]]:
    """Every leaf field of a config as (dotted key, default, help); the help ends with the choices, if there are any."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        section = _section_of(field.annotation)
        if section is not None:
            optional = not field.is_required() and field.default is None
            yield from field_help(section, f"{key}.", f"required if {key} is given" if optional else required)
            continue
        default = required if field.is_required() else str(field.get_default(call_default_factory=True))
        choices = " | ".join(map(str, typing.get_args(field.annotation))) if _is_literal(field.annotation) else ""
        yield key, default, f"{field.description or ''}{f' ({choices})' if choices else ''}"


def dump_config(config: Section) -> str:
    """The config as YAML text, defaults included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_yaml(path: Path) -> Any:
    try:
        values = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_UniqueKeys)
        return {} if values is None else values
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot be read: {error}"
        raise problem_error(
            str(path), "config.unreadable", message, "check the path; shipped ones are in configs/"
        ) from None
    except _YAML_ERRORS as error:
        raise problem_error(str(path), "config.not_yaml", f"is not valid YAML: {error}", "correct that line") from None


_YAML_ERRORS = (yaml.YAMLError, ValueError, AttributeError, RecursionError)
"""PyYAML lets through what Python says of a date or a number that cannot be, and of too deep a nesting."""


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice; PyYAML takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _apply_override(values: dict[str, Any], item: str) -> Problem | None:
    key, separator, text = item.partition("=")
    parts = key.split(".")
    if not separator or not all(parts):
        return Problem(item, "config.override", "is not of the form key=value", "write e.g. optim.learning_rate=1e-4")
    try:
        value = yaml.safe_load(text)
    except _YAML_ERRORS as error:
        return Problem(item, "config.override", f"its value is not valid YAML: {error}", "quote the value")
    node = values
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            return Problem(item, "config.override", f"{part} is not a section", "check the key with --help")
        node = child
    node[parts[-1]] = float(text) if value == text.strip() and _EXPONENT.fullmatch(value) else value
    return None


_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""YAML 1.1 reads a bare `1e-4` as a string; people mean a number. What is quoted stays a string."""


def _problem(model: type[Section], detail: Any, key: str, where: str) -> Problem:
    if detail["type"] == "extra_forbidden":
        known = [name for name, _, _ in field_help(model)]
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        return Problem(where, "config.unknown_key", f"unknown key {key!r}", f"did you mean {near[0]!r}?")
    if detail["type"] == "missing":
        return Problem(where, "config.missing", f"{key} is not given", f"add it, or pass {key}=... on the command line")
    if detail["type"] == "model_type":
        message = f"{key} is {detail['input']!r}, expected a section of keys"
        return Problem(where, "config.value", message, f"give its keys, {key}.KEY=VALUE; --help lists them")
    if detail["type"] == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        return Problem(where, "config.value", message, "correct these keys; --help says what they mean")
    said = detail["msg"].removeprefix("Value error, ")
    message = f"{key} is {detail['input']!r}: {said[0].lower()}{said[1:]}"
    return Problem(where, "config.value", message, f"correct {key}; --help says what it means")


def _place(key: str, where: str, overridden: frozenset[str]) -> str:
    """Where a wrong key was given; the empty key stands for several of them."""
    if not key and overridden and where != COMMAND_LINE:
        return f"{where}, {COMMAND_LINE}"
    return COMMAND_LINE if _is_within(key, overridden) else where


def _is_within(key: str, sections: frozenset[str]) -> bool:
    """Also for a section of which a key was given."""
    return any(f"{key}.".startswith(f"{section}.") or section.startswith(f"{key}.") for section in sections)


def _section_of(annotation: Any) -> type[Section] | None:
    candidates = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _is_literal(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.Literal
