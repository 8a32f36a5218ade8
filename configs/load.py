"""Recipes in, `RunConfig` out: TOML files, dotted overrides, and errors that say what to write instead."""

import datetime
import difflib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from configs.schema import RunConfig

RECIPES = Path(__file__).parent / "recipes"
SAME_SECTION_BONUS = 0.15
MIN_SIMILARITY = 0.65
LARGEST_TOML_INTEGER = 2**63 - 1

_WHAT_MUST_HOLD = {
    "int_type": "be a whole number",
    "int_from_float": "be a whole number",
    "float_type": "be a number",
    "string_type": "be a text in quotes",
    "bool_type": "be true or false",
    "tuple_type": "be a list in brackets",
    "dict_type": "be a section with keys of its own",
    "model_type": "be a section with keys of its own",
    "greater_than": "be greater than {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be less than {lt}",
    "less_than_equal": "be at most {le}",
    "literal_error": "be one of {expected}",
    "string_pattern_mismatch": "match {pattern}",
}
"""What each of pydantic's error types says about the value, with the names of the bounds that the error carries."""
_REASONS = {
    "rollout.temperature": "greedy samples are all alike and carry no signal (for greedy evaluation set evaluation.temperature)",
    "name": "it becomes the start of a folder's name: lower-case letters, digits, - and _",
}


class ConfigError(ValueError):
    """A recipe or an override that cannot be used; `problems` holds one sentence for each thing to mend."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration that a recipe and its overrides spell.

    path: a TOML file, or the bare name of a shipped recipe, such as `quickstart`.
    overrides: `learner.learning_rate=1e-5`, later ones win. The value is read as TOML, or as a bare text where it is none;
    `none` removes an optional section (`warm_start=none`).
    Raises ConfigError with one sentence per problem.
    """
    raw = _read_toml(find_recipe(path))
    _apply_overrides(raw, overrides)
    try:
        # Strict, so that "5" is no number and true is not 1; through JSON, where a list may still become a tuple.
        return RunConfig.model_validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        raise ConfigError(*_explain(error, raw)) from None


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the nested values that `["level=2", "a.b=x"]` spell: `{"level": 2, "a": {"b": "x"}}`; raises ConfigError."""
    raw: dict[str, Any] = {}
    _apply_overrides(raw, overrides)
    return raw


def dump_config(config: RunConfig) -> str:
    """Return the configuration as TOML, every default written out; `load_config` reads it back to an equal one."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def recipe_names() -> list[str]:
    """Return the bare names of the shipped recipes, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def find_recipe(path: str | Path) -> Path:
    """Return the file that `path` names: a TOML file, or a shipped recipe by its bare name.

    Raises ConfigError naming the nearest shipped recipe when there is no such file.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"a recipe must be a TOML file, got the folder {path}: name a file in it")
    if path.is_file():
        return path
    if path == Path(path.name) and path.stem in recipe_names() and path.suffix in ("", ".toml"):
        return RECIPES / f"{path.stem}.toml"
    near = difflib.get_close_matches(path.stem, recipe_names(), n=1, cutoff=MIN_SIMILARITY)
    advice = f"did you mean {near[0]}?" if near else "name a TOML file or a shipped recipe"
    raise ConfigError(f"a recipe must exist, got {path}: {advice} (shipped recipes: {', '.join(recipe_names())})")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} must be valid TOML, got: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8 text, got other bytes at position {error.start}: save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} must be readable, got: {error.strerror}") from None


def _apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> None:
    problems = [problem for override in overrides if (problem := _apply_override(raw, override))]
    problems += _values_outside_toml(raw)
    if problems:
        raise ConfigError(*problems)


def _apply_override(raw: dict[str, Any], override: str) -> str | None:
    """Write the override into `raw`; returns the problem, if any."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not text.strip() or not all(parts):
        return f"an override must read section.key=value, got {override!r}: write for example learner.learning_rate=1e-5"
    table = raw
    for depth, part in enumerate(parts[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return f"the override {override!r} needs a section {'.'.join(parts[:depth])}, got the value {_show(table)} there"
    if text.strip() == "none" and ".".join(parts) in _optional_sections():
        table.pop(parts[-1], None)
    else:
        table[parts[-1]] = _read_value(text)
    return None


def _read_value(text: str) -> Any:
    """Return the TOML value that `text` spells, or `text` itself where it spells none (a path, a word, a date)."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text.strip()
    # A line break in `text` could smuggle in further keys.
    is_one_value = set(table) == {"value"} and not _is_date(table["value"])
    return table["value"] if is_one_value else text.strip()


def _values_outside_toml(value: Any, key: str = "") -> Iterator[str]:
    """Yield a sentence for each value that no field can take and that JSON cannot carry."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _values_outside_toml(child, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for child in value:
            yield from _values_outside_toml(child, key)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{key} must be a finite number, got {value}"
    elif isinstance(value, int) and abs(value) > LARGEST_TOML_INTEGER:
        yield f"{key} must fit into 64 bits, got {value}"
    elif _is_date(value):
        yield f"{key} must not be a date, got {value}: put it in quotes if a text is meant"


def _is_date(value: Any) -> bool:
    return isinstance(value, datetime.date | datetime.time)


def _explain(error: ValidationError, raw: dict[str, Any]) -> list[str]:
    """Return one sentence per key that does not fit, in the order of the schema."""
    sentences: dict[str, str] = {}
    for details in error.errors(include_url=False):
        key = _dotted_key(details, raw)
        # A union reports each of its members: one sentence for the key says it all.
        is_union = key in sentences
        sentences[key] = (
            f"{key} must be a number, a text, true or false, got {_show(details['input'])}" if is_union else _sentence(key, details)
        )
    return list(sentences.values())


def _dotted_key(details: ErrorDetails, raw: Any) -> str:
    """Return the key that an error speaks of, without what pydantic appends to it (members of unions)."""
    parts: list[str] = []
    for part in details["loc"]:
        children: dict[Any, Any] = dict(enumerate(raw)) if isinstance(raw, list) else raw if isinstance(raw, dict) else {}
        if part not in children and details["type"] != "missing":
            break
        parts.append(str(part))
        raw = children.get(part)
    return ".".join(parts)


def _sentence(key: str, details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{key} is not a key of a recipe: {_advice(key)}"
    if kind == "missing":
        return f"{key} is missing: {_describe(key)}"
    if kind == "value_error":
        return str(context["error"])
    if kind not in _WHAT_MUST_HOLD:
        return f"{key} does not fit, got {_show(details['input'])}: {details['msg']}"
    sentence = f"{key} must {_WHAT_MUST_HOLD[kind].format_map(_shown_bounds(context))}, got {_show(details['input'])}"
    if kind == "literal_error" and isinstance(details["input"], str):
        near = difflib.get_close_matches(details["input"], str(context["expected"]).split("'")[1::2], n=1)
        sentence += f": did you mean {near[0]}?" if near else ""
    reason = _REASONS.get(key) if kind in ("greater_than", "string_pattern_mismatch") else None
    return f"{sentence}: {reason}" if reason else sentence


def _shown_bounds(context: Mapping[str, Any]) -> dict[str, str]:
    return {name: bound if isinstance(bound, str) else _show(bound) for name, bound in context.items()}


def _show(value: Any) -> str:
    """Return the value as a user would write it."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}" if value else "0"
    return json.dumps(value)


def _advice(key: str) -> str:
    """Return which valid keys a wrong one may have meant; the same section counts first, other sections count too."""
    section, _, name = key.rpartition(".")

    def similarity(valid: str) -> float:
        valid_section, _, valid_name = valid.rpartition(".")
        alike = difflib.SequenceMatcher(None, name, valid_name).ratio()
        return alike + SAME_SECTION_BONUS * (section == valid_section) if alike >= MIN_SIMILARITY else 0.0

    scores = {valid: similarity(valid) for valid in valid_keys()}
    best = max(scores.values())
    if best:
        return f"did you mean {' or '.join(valid for valid, score in scores.items() if score == best)}?"
    siblings = [valid for valid in valid_keys() if valid.rpartition(".")[0] == section]
    return f"the keys of {f'[{section}]' if siblings and section else 'a recipe'} are {', '.join(siblings or RunConfig.model_fields)}"


def _describe(key: str) -> str:
    """Return what to add for a missing key."""
    field = _fields()[key]
    if _section_of(field):
        return f"add the section [{key}]"
    return f"add it. {(field.description or '').splitlines()[0]}"


def valid_keys() -> list[str]:
    """Return every key that a recipe may hold, dotted, sections included, in the order of the schema."""
    return list(_fields())


def _optional_sections() -> set[str]:
    return {key for key, field in _fields().items() if _section_of(field) and NoneType in get_args(field.annotation)}


def _fields(model: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, FieldInfo]:
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        found[prefix + name] = field
        if section := _section_of(field):
            found |= _fields(section, f"{prefix}{name}.")
    return found


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a section, optional or not, else None."""
    candidates = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
