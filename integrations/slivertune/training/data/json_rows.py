"""Rows of json and jsonl files, each value as it is written.

The JSON reader of the datasets library gives all values of a key one type: 3 becomes 3.0 if another row has 2.5, a text
such as 2031-03-07 becomes a time, floats lose digits, a null is no longer told from an absent key, and a text that is
JSON itself is read again. Here a column whose values are not of one plain type is stored as JSON (`JsonValue`).
"""

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import datasets
from datasets.features.features import register_feature

_PLAIN = {str: "string", bool: "bool", int: "int64", float: "float64"}
_LARGEST = 2**63 - 1


@dataclass
class JsonValue:
    """Type of a column whose values may differ in type. Each is stored as JSON."""

    pa_type: ClassVar[Any] = datasets.Value("string")()
    _type: str = field(default="JsonValue", init=False, repr=False)  # by which datasets finds it again in its cache

    def __call__(self) -> Any:
        """Return the type in which values are stored."""
        return self.pa_type

    def __repr__(self) -> str:
        return "JSON values"

    def encode_example(self, value: Any) -> str | None:
        """Write a value as JSON. None stays none."""
        return None if value is None else json.dumps(value, ensure_ascii=False)

    def decode_example(self, value: str | None, token_per_repo_id: Any = None) -> Any:
        """Read a value again."""
        return None if value is None else json.loads(value)


with warnings.catch_warnings():
    # It warns that features of other packages are experimental.
    warnings.simplefilter("ignore", UserWarning)
    register_feature(JsonValue, JsonValue.__name__)


class JsonRows(datasets.GeneratorBasedBuilder):  # type: ignore[misc]
    """Reads json and jsonl files: a row per line, or one list of rows."""

    def _info(self) -> Any:
        return datasets.DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list[Any]:
        files_of = {name: [Path(file) for file in files] for name, files in self.config.data_files.items()}
        # One type for all splits that are read.
        self.info.features = _features(row for files in files_of.values() for row in _rows_of(files))
        if not self.info.features:
            raise ValueError("there are no rows in it")
        return [datasets.SplitGenerator(name=name, gen_kwargs={"files": files}) for name, files in files_of.items()]

    def _generate_examples(self, files: list[Path]) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, row in enumerate(_rows_of(files)):
            yield number, {name: row.get(name) for name in self.info.features}


def load_json(files_of_split: dict[str, list[str]], splits: list[str], cache_dir: str | None) -> list[Any]:
    """Load splits of json and jsonl files.

    Args:
        files_of_split: Paths by split, which may be glob patterns.
        splits: Names of splits, or slices such as `train[:100]`.
        cache_dir: Folder for prepared data; None for that of the datasets library.

    Returns:
        One `datasets.Dataset` per split.

    Raises:
        ValueError: If a file is no JSON (names the line), has no rows, or if a slice does not exist.
    """
    read = {part.partition("[")[0].strip() for split in splits for part in split.split("+")}
    files = {name: files for name, files in files_of_split.items() if name in read}
    # What older code has cached is not read.
    own_code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    builder = JsonRows(cache_dir=cache_dir, data_files=files, hash=own_code)
    builder.download_and_prepare()
    return [builder.as_dataset(split=split) for split in splits]


def _features(rows: Iterable[dict[str, Any]]) -> Any:
    kinds: dict[str, set[Any]] = {}
    for row in rows:
        for name, value in row.items():
            known = kinds.setdefault(name, set())
            if value is not None:
                known.add(type(value) if type(value) is not int or -_LARGEST <= value <= _LARGEST else None)
    return datasets.Features({name: _feature(known) for name, known in kinds.items()})


def _feature(kinds: set[Any]) -> Any:
    if not kinds:
        return datasets.Value("null")
    plain = _PLAIN.get(next(iter(kinds))) if len(kinds) == 1 else None
    return JsonValue() if plain is None else datasets.Value(plain)


def _rows_of(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        try:
            with file.open(encoding="utf-8-sig") as lines:
                is_one = _is_one_value(lines)
                lines.seek(0)
                yield from _listed(lines.read()) if is_one else _by_line(lines)
        except ValueError as error:
            raise ValueError(f"{file.name}: {error}") from None


def _is_one_value(lines: Any) -> bool:
    """Return whether a file is one list, or one object over several lines, and not a row per line."""
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("["):
        return True
    return not _is_json(first) and _is_json(first + lines.read())


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _by_line(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _row(_parsed(line.rstrip(), f"line {number}"), f"line {number}")


def _listed(text: str) -> Iterator[dict[str, Any]]:
    found = _parsed(text, "the file")
    if isinstance(found, dict):
        columns = list(found.values())
        if not columns or any(not isinstance(each, list) or len(each) != len(columns[0]) for each in columns):
            raise ValueError("the file is one object. Write a row per line, or a list of rows")
        found = [dict(zip(found, values, strict=True)) for values in zip(*columns, strict=True)]
    for number, item in enumerate(found):
        yield {"text": item} if isinstance(item, str) else _row(item, f"item {number} of the list")


def _row(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is no object with a value for each column")
    return value


def _parsed(text: str, place: str) -> Any:
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError:
        raise ValueError(f"{place} has an escape such as \\ud800 alone, which is half a character") from None
    except RecursionError as error:
        raise ValueError(f"{place} is nested too deeply") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}" if place == "the file" else place
        raise ValueError(f"{line}, column {error.colno}: {error.msg}") from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is larger than any number of 64 bits. Write it as text")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON. Write null or a number")
