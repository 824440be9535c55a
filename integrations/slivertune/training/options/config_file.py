"""Reads a file of options for `slivertune train`: YAML or JSON, one key per option.

Values are read as text, as if they had been typed. YAML 1.1 would read `off` and `no` as false, although
`save_strategy: no` means the word, and `1e-4` as a string.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slivertune.core.suggestions import did_you_mean
from slivertune.core.text_encoding import find_not_utf8
from slivertune.core.user_path import user_path

SUFFIXES = (".yaml", ".yml", ".json")
_TAG = "tag:yaml.org,2002:"
_TEXT_TAGS = frozenset(f"{_TAG}{kind}" for kind in ("str", "int", "float", "bool", "timestamp"))

Value = str | list[str] | dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of a file, with its value as written."""

    key: str
    value: Value
    """Value as written. None for `null`."""
    place: str
    """File name, and the line if it is known, for errors."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml ships no types
    """A loader of YAML's safe types that reads 1e-4 inside of mappings as a number, as YAML 1.2 and JSON do."""


_LOWERCASE_EXPONENT = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver(f"{_TAG}float", _LOWERCASE_EXPONENT, list("-+.0123456789"))


def _integer(text: str) -> int | str:
    """Parse an integer. Return the text of one with too many digits, which the option's check then refuses."""
    try:
        return int(text)
    except ValueError:
        return text


def _yaml_integer(loader: Any, node: Any) -> Any:
    try:
        return loader.construct_yaml_int(node)
    except ValueError:
        return node.value


_Loader.add_constructor(f"{_TAG}int", _yaml_integer)


def read_settings(path: Path) -> list[Setting]:
    """Read a file of options.

    Args:
        path: Path that ends in .yaml, .yml or .json.

    Returns:
        The settings, in the order of the file.

    Raises:
        ValueError: If the file is missing, can't be read, holds no mapping, has a key twice, or has a value that no
            option takes.
    """
    if path.suffix.lower() not in SUFFIXES and not user_path(path).is_dir():
        raise ValueError(
            f"{str(path)!r} is not a config file: its name must end in {', '.join(SUFFIXES)}. Name a model by "
            "--model_name_or_path, data by --dataset"
        )
    text = _read_text(path)
    read = _read_json if path.suffix.lower() == ".json" else _read_yaml
    settings = read(text, path)
    if not settings:
        raise ValueError(f"config file {path} is empty. Write one option per line, as in learning_rate: 1e-4")
    return settings


def _read_text(path: Path) -> str:
    try:
        if (not_text := find_not_utf8(user_path(path))) is not None:
            raise ValueError(f"config file {not_text}")
        return user_path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        beside = user_path(path).parent
        there = [each.name for each in beside.iterdir() if each.suffix in SUFFIXES] if beside.is_dir() else []
        way_out = did_you_mean(path.name, there) or ". Check its path"
        raise ValueError(f"config file {path} is not there{way_out}") from None
    except IsADirectoryError:
        holds_model = (user_path(path) / "config.json").is_file()
        way_out = f"To name the model in it, write --model_name_or_path {path}" if holds_model else "Name a file in it"
        raise ValueError(f"config file {path} is a folder. {way_out}") from None
    except OSError as error:
        raise ValueError(f"config file {path} can't be read: {error.strerror}. Name one that can be read") from error


def _read_yaml(text: str, path: Path) -> list[Setting]:
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ValueError(
                f"config file {path} must be a mapping with a line per option. Write lines such as learning_rate: 1e-4"
            )
        _check_keys(root, path)
        return [
            Setting(str(key.value), _value(str(key.value), node, place := _place(path, key), loader), place)
            for key, node in root.value
        ]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise ValueError(f"config file {path} is no valid YAML: {error.problem}{where}. Correct it there") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"config file {path} is no valid YAML: {error}. Correct the file") from error


def _place(path: Path, node: Any) -> str:
    return f"{path}, line {node.start_mark.line + 1}"


def _check_keys(root: Any, path: Path) -> None:
    """Refuse keys that are no names, and keys that appear twice in a mapping, including nested ones."""
    for node in _mappings(root, set()):
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_TAG}merge":
                raise ValueError(
                    f"{_place(path, key)}: a key must be a name, and merging (<<) is not supported. Write each option "
                    "out"
                )
            if key.value in seen:
                raise _said_twice(_place(path, key), key.value, f", first in line {seen[key.value]}")
            seen[key.value] = key.start_mark.line + 1


def _said_twice(place: str, key: str, first: str = "") -> ValueError:
    return ValueError(f"{place}: {key} is set twice{first}. Keep one of the two")


def _mappings(node: Any, visited: set[int]) -> Iterator[Any]:
    """Yield the mappings under a node, including itself. An alias may lead back to a visited node."""
    if id(node) in visited or isinstance(node, yaml.ScalarNode):
        return
    visited.add(id(node))
    is_mapping = isinstance(node, yaml.MappingNode)
    if is_mapping:
        yield node
    for child in (value for _, value in node.value) if is_mapping else node.value:
        yield from _mappings(child, visited)


def _value(key: str, node: Any, place: str, loader: Any) -> Value:
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = loader.construct_object(node, deep=True)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return _checked_list(key, [_scalar(key, item, place) for item in node.value], place)
    # An empty value was probably forgotten, so only a written null counts as None.
    return None if node.tag == f"{_TAG}null" and node.value else _scalar(key, node, place)


def _scalar(key: str, node: Any, place: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _nested(key, place)
    if node.tag == f"{_TAG}null":
        raise _has_no_value(key, place)
    if node.tag not in _TEXT_TAGS:
        raise ValueError(f"{place}: {key} has a value of type {node.tag}, which no option takes. Leave the tag out")
    return str(node.value)


def _nested(key: str, place: str) -> ValueError:
    return ValueError(
        f"{place}: {key} has a list or a mapping inside of a list, which no option takes. Write its values in one list"
    )


def _has_no_value(key: str, place: str) -> ValueError:
    return ValueError(f"{place}: {key} has no value. Give it one (in quotes if it is a text), or leave the key out")


def _checked_list(key: str, items: list[str], place: str) -> list[str]:
    if not items:
        raise ValueError(f"{place}: {key} is an empty list. Give a value, or leave the key out")
    return items


def _read_json(text: str, path: Path) -> list[Setting]:
    if not text.strip():
        return []
    try:
        root = json.loads(text, object_pairs_hook=_unique_keys(str(path)), parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"config file {path} is no valid JSON: {error}. Correct it there") from error
    except RecursionError as error:
        raise ValueError(
            f"config file {path} is no valid JSON: it is nested too deeply. Write one key per option"
        ) from error
    if not isinstance(root, dict):
        raise ValueError(
            f'config file {path} must be an object with a key per option. Write it as in {{"learning_rate": 1e-4}}'
        )
    return [Setting(key, _json_value(key, value, str(path)), str(path)) for key, value in root.items()]


def _unique_keys(place: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _said_twice(place, key)
            found[key] = value
        return found

    return collect


def _json_value(key: str, value: Any, place: str) -> Value:
    if isinstance(value, dict):
        return value
    if isinstance(value, list):
        return _checked_list(key, [_json_scalar(key, item, place) for item in value], place)
    return None if value is None else _json_scalar(key, value, place)


def _json_scalar(key: str, value: Any, place: str) -> str:
    if isinstance(value, (dict, list)):
        raise _nested(key, place)
    if value is None:
        raise _has_no_value(key, place)
    return str(value).lower() if isinstance(value, bool) else str(value)
