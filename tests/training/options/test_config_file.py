import json
import re
from pathlib import Path
from typing import Any

import pytest

from slivertune.training.options.config_file import Setting, read_settings

YAML = """\
# a run
learning_rate: 1e-4
seed: 0x10        # left as it is written
memory_ledger: off
save_strategy: no
bf16: true
run_name: 2026-01-02
dataset: [a.jsonl, "b c.jsonl"]
dataset_weights:
  - 0.7
  - .3
response_separator: "\\n"
sample_prompt: 'null'
lr_scheduler_kwargs: {min_lr: 1e-5, num_cycles: 2, on: [1, x]}
"""


def test_values_are_what_is_written_and_their_lines_are_known(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(YAML, encoding="utf-8")
    values: dict[str, Any] = {
        "learning_rate": "1e-4",
        "seed": "0x10",
        "memory_ledger": "off",
        "save_strategy": "no",
        "bf16": "true",
        "run_name": "2026-01-02",
        "dataset": ["a.jsonl", "b c.jsonl"],
        "dataset_weights": ["0.7", ".3"],
        "response_separator": "\n",
        "sample_prompt": "null",
        # Inside of a mapping YAML's types hold, where nobody says what is meant.
        "lr_scheduler_kwargs": {"min_lr": 1e-5, "num_cycles": 2, True: [1, "x"]},
    }
    lines = [2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14]
    expected = [
        Setting(key, value, f"{path}, line {line}") for (key, value), line in zip(values.items(), lines, strict=True)
    ]
    assert read_settings(path) == expected


def test_json_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    values = {"learning_rate": 1e-4, "seed": 3, "bf16": True, "dataset": ["a", "b"], "lr_scheduler_kwargs": {"x": 1e-5}}
    # Tabs, which YAML does not take, are indentation here.
    path.write_text(json.dumps(values, indent="\t"), encoding="utf-8-sig")
    assert [(each.key, each.value) for each in read_settings(path)] == [
        ("learning_rate", "0.0001"),
        ("seed", "3"),
        ("bf16", "true"),
        ("dataset", ["a", "b"]),
        ("lr_scheduler_kwargs", {"x": 1e-5}),
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.yaml", "", "config file run.yaml is empty. Write one option per line"),
        ("run.yaml", "# nothing yet\n", "config file run.yaml is empty"),
        ("run.yaml", "{}", "config file run.yaml is empty"),
        ("run.json", "  ", "config file run.json is empty"),
        ("run.json", "{}", "config file run.json is empty"),
        ("run.yaml", "- seed\n", "config file run.yaml must be a mapping with a line per option"),
        ("run.yaml", "seed 3\n", "config file run.yaml must be a mapping"),
        ("run.json", "[1]", "config file run.json must be an object with a key per option"),
        ("run.yaml", "seed: 3\nbf16: [true\n", "run.yaml is no valid YAML: expected ',' or ']', but got"),
        ("run.yaml", "seed: 3\n\tbf16: true\n", "(line 2, column 1)"),
        ("run.yaml", "seed: 3\n---\nseed: 4\n", "is no valid YAML: but found another document (line 2, column 1)"),
        ("run.yaml", "seed: \x00\n", "is not UTF-8 text: line 1 has a zero byte"),
        ("run.json", '{"seed": 3,}', "run.json is no valid JSON: "),
        ("run.yaml", "seed: 3\norder: random\nseed: 4\n", "run.yaml, line 3: seed is set twice, first in line 1. Keep"),
        ("run.json", '{"seed": 3, "seed": 4}', "run.json: seed is set twice. Keep one of the two"),
        ("run.yaml", "fsdp_config: {a: 1, a: 2}\n", "run.yaml, line 1: a is set twice, first in line 1"),
        ("run.yaml", "seed:\n", "run.yaml, line 1: seed has no value. Give it one"),
        ("run.yaml", "dataset: [~]\n", "dataset has no value"),
        ("run.json", '{"dataset": [null]}', "run.json: dataset has no value"),
        ("run.yaml", "dataset: []\n", "run.yaml, line 1: dataset is an empty list"),
        ("run.yaml", "dataset: [a, null]\n", "dataset has no value"),
        ("run.json", '{"dataset": []}', "dataset is an empty list"),
        ("run.yaml", "dataset: [[a]]\n", "dataset has a list or a mapping inside of a list"),
        ("run.json", '{"dataset": [{"a": 1}]}', "dataset has a list or a mapping inside of a list"),
        ("run.yaml", "seed: !!binary aGk=\n", "seed has a value of type tag:yaml.org,2002:binary"),
        ("run.yaml", "seed: !!python/name:os.system\n", "seed has a value of type tag:yaml.org,2002:python/name"),
        ("run.yaml", "fsdp_config: {a: !!python/name:os.system }\n", "could not determine a constructor for the tag"),
        (
            "run.yaml",
            "a: &a {seed: 3}\n<<: *a\n",
            "run.yaml, line 2: a key must be a name, and merging (<<) is not supported",
        ),
        ("run.yaml", "[a]: 3\n", "run.yaml, line 1: a key must be a name"),
        ("run.yaml", "fsdp_config: &a {b: *a}\n", "is no valid YAML: found unconstructable recursive node"),
        ("run.yaml", "dataset: &a [*a]\n", "dataset has a list or a mapping inside of a list"),
        ("run.yaml", "fsdp_config: " + "[" * 5000 + "]" * 5000, "is no valid YAML"),
        ("run.json", '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "is no valid JSON: it is nested too deeply"),
        ("rows.csv", "a,b\n", "'rows.csv' is not a config file: its name must end in .yaml, .yml, .json. Name a model"),
    ],
)
def test_what_is_no_list_of_options_is_an_error_that_names_file_and_line(
    name: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        read_settings(Path(name))


def test_what_is_no_readable_file_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.yaml").mkdir()
    Path("model").mkdir()
    Path("model/config.json").write_text("{}", encoding="utf-8")
    Path("latin.yaml").write_bytes("run_name: café\n".encode("latin-1"))
    Path("qlora.yaml").write_text("seed: 1\n", encoding="utf-8")
    for name, message in (
        ("folder.yaml", "config file folder.yaml is a folder. Name a file in it"),
        (".", "config file . is a folder. Name a file in it"),
        ("model", "config file model is a folder. To name the model in it, write --model_name_or_path model"),
        ("latin.yaml", "config file latin.yaml is not UTF-8 text: line 1 has the byte 0xe9. Convert it"),
        ("qlroa.yaml", "config file qlroa.yaml is not there; did you mean qlora.yaml?"),
        ("none/at/all.yaml", "config file none/at/all.yaml is not there. Check its path"),
        ("qlora.yaml/run.yaml", "config file qlora.yaml/run.yaml can't be read: Not a directory"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            read_settings(Path(name))
