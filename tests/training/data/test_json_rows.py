"""Values of json files as they are written, against Python's own reader, and against what else would change them."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slivertune.training.data import json_rows
from slivertune.training.data.json_rows import JsonValue, load_json
from slivertune.training.data.local_files import load_local
from tests.training.tiny import write

CALL = {"name": "f", "arguments": {"b": 3, "a": None, "c": 1e-12, "d": 52.520006599912345, "e": 2**70, "f": 0.1}}
ROWS: list[dict[str, Any]] = [
    {"day": "2031-03-07", "number": 3, "messages": [{"role": "assistant", "content": '"Quoted."', "calls": [CALL]}]},
    {"day": "word", "number": 2.5, "messages": [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}]},
    {"day": None, "number": 2**70, "messages": [{"role": "user", "content": "42"}, {"role": "user", "content": None}]},
]
"""Rows that one type for all values of a key would change."""


def read(folder: Path, text: str, name: str = "rows.jsonl") -> Any:
    (rows,) = load_local(Path(write(folder / name, text)), ["train"], cache_dir=str(folder / "cache"))
    return rows


@pytest.mark.parametrize("form", ["lines", "list", "indented", "with a mark"])
def test_values_stay_as_they_are_written(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(json.dumps(row) + "\n\n" for row in ROWS)
    texts = {
        "lines": lines,
        "with a mark": f"\ufeff{lines}",
        "list": json.dumps(ROWS),
        "indented": json.dumps(ROWS, indent=2),
    }
    path = Path(write(tmp_path / "rows.jsonl", texts[form]))
    for _ in range(2):
        (rows,) = load_local(path, ["train"], cache_dir=str(tmp_path / "cache"))
        monkeypatch.setattr(json_rows, "_features", None)  # the second time they come from the cache
        assert list(rows) == ROWS and [*rows[0]["messages"][0]["calls"][0]["arguments"]] == [*"bacdef"]
        assert rows["number"][:] == [3, 2.5, 2**70] and type(rows[0]["number"]) is int
        assert rows.features == {
            "day": datasets.Value("string"),
            "number": JsonValue(),
            "messages": JsonValue(),
        }
        assert next(rows.select([2, 0]).iter(batch_size=2))["messages"] == [ROWS[2]["messages"], ROWS[0]["messages"]]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.fixed_dictionaries({"a": VALUES, "b": VALUES}), min_size=1, max_size=4))
def test_any_value_comes_back(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    assert list(read(tmp_path_factory.mktemp("json"), "".join(json.dumps(row) + "\n" for row in rows))) == rows


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('["a", "b"]', [{"text": "a"}, {"text": "b"}]),
        ('{"a": 1}\n{"b": true}\n', [{"a": 1, "b": None}, {"a": None, "b": True}]),
        ('{\n"text": ["a", "b"],\n"label": [1, 2]}', [{"text": "a", "label": 1}, {"text": "b", "label": 2}]),
    ],
)
def test_other_forms_of_files(text: str, expected: list[dict[str, Any]], tmp_path: Path) -> None:
    assert list(read(tmp_path, text, "rows.json")) == expected


def test_splits_of_a_folder_have_one_type_and_may_be_sliced(tmp_path: Path) -> None:
    files = {
        "train": [write(tmp_path / "train.jsonl", '{"a": 1}\n{"a": 2}\n{"a": 3}\n')],
        "test": [write(tmp_path / "test.jsonl", '{"a": "x", "b": 1.5}\n')],
    }
    train, test = load_json(files, ["train[1:]", "test"], str(tmp_path / "cache"))
    assert (train["a"][:], test["a"][:], train["b"][:]) == ([2, 3], ["x"], [None, None])
    # A split that is not read has no part in it.
    (train,) = load_json(files, ["train"], str(tmp_path / "cache"))
    assert train.features == {"a": datasets.Value("int64")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a":\n', r"rows\.jsonl: line 2, column 6: Expecting value"),
        ('{"a": 1}{"a": 2}\n', r"rows\.jsonl: line 1, column 9: Extra data"),
        ('{"a": 1}\n[2]\n', r"line 2 is no object"),
        ('[{"a": 1}, 2]', r"item 1 of the list is no object"),
        ('{\n"a": 1}', r"is one object\. Write a row per line"),
        ('{"a": NaN}', r"line 1: NaN is no JSON"),
        ('{"a": 1e400}', r"line 1: 1e400 is larger than any number"),
        ("[]", r"there are no rows in it"),
        ('{"a": 1, "a": 2}', r"line 1: the key 'a' is there twice"),
        ('{"a": {"b": 1, "b": 2}}', r"line 1: the key 'b' is there twice"),
        ('{"a": "\\ud800"}', r"line 1 has an escape such as \\ud800 alone"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", r"line 1 is nested too deeply"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_json_is_named_by_its_place(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"rows\.jsonl can't be read as json: .*{message}"):
        read(tmp_path, text)
