"""Read a YAML file that the user wrote, and check it against its schema in ``rules/``.

Imports nothing of ours: the configuration and the prompts are read by it.
"""

import math
from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from jsonschema import TypeChecker
from jsonschema.exceptions import best_match
from jsonschema.validators import extend

RULES = Path(__file__).resolve().parent.parent / "rules"


class ConfigError(ValueError):
    """What to mend in a file that the user wrote: file, key, value, and what is allowed."""


_Libyaml: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a ninth of the time, where it is built in


class _TextKeys(yaml.constructor.SafeConstructor):
    """YAML that refuses a key given twice, of which plain YAML silently keeps the last, and one that is no text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build one mapping."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            wrong = "" if isinstance(key, str) else "is no text; put it in quotes, or correct it"
            if wrong or key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} {wrong or 'stands twice'}", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Loader(_TextKeys, _Libyaml):
    """For files as they should be."""


class _Explainer(_TextKeys, yaml.SafeLoader):
    """For the others: it shows the line."""


def _is_whole(_: TypeChecker, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(_: TypeChecker, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# JSON schema calls 16.0 an integer, and YAML's .nan a number; range(16.0) and a limit of NaN are neither.
_Validator = extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"integer": _is_whole, "number": _is_finite}
    ),
)


def read_yaml(path: Path, schema: str) -> Any:
    """Parse ``path`` and check it against ``rules/<schema>.schema.yaml``.

    Raises
    ------
    ConfigError
        Missing or unreadable file, bad YAML, or the first value that the schema refuses.
    """
    try:
        content = _parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2026-02-30
        raise ConfigError(f"{path}: no valid YAML: {' '.join(str(error).split())}") from error
    found = _Validator(_rules(schema)).iter_errors(content)
    worst = best_match(found)
    if worst is not None:
        raise ConfigError(f"{path}: {_explain(worst)}")
    return content


def _parse(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return yaml.load(text, _Explainer)


@cache
def _rules(schema: str) -> Any:
    """Parse a schema: ours, so that its errors need no line."""
    return yaml.load((RULES / f"{schema}.schema.yaml").read_text(encoding="utf-8"), _Libyaml)


def _explain(error: jsonschema.ValidationError) -> str:
    where = ".".join(str(part) for part in error.absolute_path) or "top level"
    rule: Any = error.schema
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        unknown = [key for key in error.instance if key not in rule["properties"]]
        return f"{where}: unknown key {', '.join(map(repr, unknown))}; keys: {', '.join(rule['properties'])}"
    if error.validator == "pattern" and "propertyNames" in error.absolute_schema_path:
        return f"{where}: name {error.instance!r} must match {error.validator_value}"
    if error.validator == "required":
        missing = [key for key in rule["required"] if key not in error.instance]
        return f"{where}: key {', '.join(map(repr, missing))} is missing"
    return f"{where}: {error.message}"
