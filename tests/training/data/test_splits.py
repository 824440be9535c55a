import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import datasets
import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from slivertune.training.data.columns import ROW_COLUMN
from slivertune.training.data.local_files import load_local
from slivertune.training.data.splits import check_datasets, load_datasets, load_splits
from slivertune.training.options.arguments import DataArguments
from tests.training.tiny import bert_config, prepared, splits_from, word_tokenizer, write

NUMBERED = "text\n" + "".join(f"row {number}\n" for number in range(20))


def test_without_evaluation_rows_a_seeded_fraction_is_held_out_and_rows_keep_their_number(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.csv", NUMBERED)
    splits = splits_from(file, eval_fraction=0.2, seed=3)
    assert (len(splits["train"]), len(splits["eval"])) == (16, 4)
    assert set(splits["train"]["text"]).isdisjoint(splits["eval"]["text"])
    for split in splits.values():
        assert [f"row {number}" for number in split[ROW_COLUMN]] == list(split["text"])
    again, other = splits_from(file, eval_fraction=0.2, seed=3), splits_from(file, eval_fraction=0.2, seed=4)
    assert list(again["eval"]["text"]) == list(splits["eval"]["text"])
    assert list(other["eval"]["text"]) != list(splits["eval"]["text"])


def test_named_evaluation_rows_come_from_a_split_a_slice_or_another_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.csv", NUMBERED)
    write(folder / "dev.csv", "text\nfrom dev\n")
    assert list(splits_from(folder, eval_split="validation")["eval"]["text"]) == ["from dev"]
    sliced = splits_from(folder / "train.csv", train_split="train[:5]", eval_split="train[18:]")
    assert (len(sliced["train"]), list(sliced["eval"]["text"])) == (5, ["row 18", "row 19"])
    elsewhere = splits_from(folder / "train.csv", eval_file=write(tmp_path / "e.jsonl", '{"text": "from json"}\n'))
    assert (len(elsewhere["train"]), list(elsewhere["eval"]["text"])) == (20, ["from json"])


def test_a_built_in_dataset_has_evaluation_rows_that_a_file_may_replace(tmp_path: Path) -> None:
    splits = splits_from(Path("builtin:dates"))
    assert (len(splits["train"]), len(splits["eval"])) == (4096, 128)
    assert splits["eval"][ROW_COLUMN][:2] == [0, 1]
    file = write(tmp_path / "e.csv", "prompt,response\n2000-01-01,1 January 2000\n")
    assert list(splits_from(Path("builtin:dates"), eval_file=file)["eval"]["prompt"]) == ["2000-01-01"]
    check_datasets(DataArguments(dataset=["builtin:dates", "builtin:python-reference"]))
    with pytest.raises(ValueError, match="'builtin:rows' is not built in"):
        check_datasets(DataArguments(dataset=["builtin:rows"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": None}, "Give --dataset a hub id or a local file"),
        ({"dataset": ["nowhere/rows.csv"]}, "dataset 'nowhere/rows.csv' is not there (looked for from"),
        ({"dataset": ["./nowhere"]}, "Give an existing .csv, .tsv"),
        ({"dataset": ["two words"]}, "a hub id (name or owner/name)"),
        (
            {"dataset": ["builtin:date"]},
            "'builtin:date' is not built in. Use builtin:dates or builtin:python-reference",
        ),
        ({"dataset": ["builtin:dates"], "dataset_config": "a"}, "is for other data than builtin:dates"),
        ({"dataset": ["builtin:dates"], "sample_by": "document"}, "is for other data than builtin:dates"),
        ({"dataset": ["builtin:dates"], "column_names": ["a"]}, "is for other data than builtin:dates"),
        ({"dataset": ["builtin:dates"], "train_split": "train[:5]"}, "Use train, eval (it takes no slices)"),
        ({"eval_file": "nowhere.csv"}, "eval_file 'nowhere.csv' is no file"),
        ({"eval_split": "test", "eval_file": "e.csv"}, "Keep one"),
        ({"eval_split": "test"}, "has no split 'test'. Use train, or --eval_file"),
        ({"eval_split": "trian[:3]"}, "(a file has one split, train); did you mean train?"),
        ({"train_split": "train[90:]"}, "rows.csv has no rows. Give a slice within its rows"),
        ({"train_split": "train[:3"}, "split 'train[:3' is not a slice. Write it as train[:100]"),
        ({"train_split": "train[:300%]"}, "is not a slice"),
        ({"train_split": "test[:3]"}, "has no split 'test[:3]'. Use train"),
        ({"eval_fraction": 0.0}, "eval_fraction=0.0 must lie between 0 and 1"),
        ({"dataset_config": "sst2"}, "dataset_config='sst2' is for hub datasets"),
        ({"dataset": ["owner/name"], "column_names": ["a"]}, "'owner/name' is on the hub"),
        ({"dataset": ["owner/name"], "sample_by": "document"}, "for local txt files, and 'owner/name' is on the hub"),
        (
            {"train_split": "train[:1]"},
            "1 rows are too few to hold out 0.1 of them for evaluation. Name evaluation rows",
        ),
        ({"train_split": "train[:1]"}, "or cut a txt file finer with --sample_by"),
    ],
)
def test_what_is_not_there_is_named_with_the_way_out(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.csv", NUMBERED)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_splits(DataArguments(**{"dataset": [file], **options}), seed=0)


@pytest.fixture
def answer_of_hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the hub answer every question with an error, or with nothing."""

    def answer(error: Exception | None) -> None:
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", Mock(side_effect=error))

    return answer


def test_a_file_of_nearly_that_name_is_asked_for(
    answer_of_hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "questions.csv", NUMBERED)
    answer_of_hub(OSError("no route"))
    monkeypatch.chdir(tmp_path)
    # Without a known ending it may be on the hub.
    with pytest.raises(ConnectionError, match=re.escape("; did you mean questions.csv?")):
        load_splits(DataArguments(dataset=["questions.cvs"]), seed=0)
    with pytest.raises(ValueError, match=re.escape(f"; did you mean {file}?")):
        load_splits(DataArguments(dataset=[str(tmp_path / "qusetions.csv")]), seed=0)


def test_an_unreachable_hub_is_said_at_once(
    answer_of_hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer_of_hub(OSError("no route"))
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(ConnectionError, match=r"'owner/name' is no local file or folder.*no route.*Name a local file"):
        splits_from("owner/name", dataset_cache_dir=str(tmp_path))
    assert waits == [], "the datasets library's own retries wait for half a minute in all"


@pytest.mark.parametrize(
    ("probed", "loaded", "message"),
    [
        # An unknown dataset is told from an unreachable hub.
        (
            RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None)),
            None,
            "neither a local file or folder nor a dataset that the hub shows you",
        ),
        (
            None,
            ValueError("Config name is missing.\nPlease pick one among ['sst2', 'mnli']"),
            "pick one among ['sst2', 'mnli']. See --dataset_config",
        ),
    ],
)
def test_what_the_hub_does_not_have_is_passed_on_with_the_way_out(
    probed: Exception | None,
    loaded: Exception | None,
    message: str,
    answer_of_hub: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer_of_hub(probed)
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=loaded))
    with pytest.raises(ValueError, match=re.escape(message)):
        splits_from("nyu-mll/glue")


def test_a_cached_hub_dataset_is_used_when_the_hub_is_unreachable(
    answer_of_hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer_of_hub(OSError("no route"))
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: [datasets.Dataset.from_dict({"text": ["one", "two"]})]
    )
    (tmp_path / "owner___some_name" / "default").mkdir(parents=True)
    splits = splits_from("owner/someName", dataset_cache_dir=str(tmp_path), eval_fraction=0.5)
    assert {*splits["train"]["text"], *splits["eval"]["text"]} == {"one", "two"}
    assert "so owner/someName is read from the cache" in caplog.text


def test_nothing_is_written_outside_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, data = tmp_path / "cache", tmp_path / "data"
    data.mkdir()
    write(data / "rows.csv", "sentence,label\n" + "a good film,1\na bad film,0\n" * 10)
    monkeypatch.chdir(data)
    splits = splits_from("rows.csv", dataset_cache_dir=str(cache))
    task = prepared(splits, word_tokenizer(), bert_config(), task="classification")
    assert [file.name for file in data.iterdir()] == ["rows.csv"]
    files = [file["filename"] for file in (*task.train_dataset.cache_files, *task.eval_dataset.cache_files)]
    assert files, "tokenised rows are kept on the disk, so that other processes and later runs read them"
    assert all(Path(file).is_relative_to(cache) for file in files)


def test_the_sentiment_treebank_is_read_without_a_header_line(shared_data: Path) -> None:
    folder = shared_data / "sst2"
    splits = splits_from(folder, column_names=["sentence", "label"], eval_split="validation")
    assert (len(splits["train"]), len(splits["eval"])) == (6920, 872)
    assert splits["eval"][0] == {"sentence": "one long string of cliches", "label": "0", ROW_COLUMN: 0}
    lines = (folder / "dev.tsv").read_text(encoding="utf-8").splitlines()
    assert [f"{row['sentence']}\t{row['label']}" for row in splits["eval"]] == lines


def test_the_restaurant_descriptions_are_read_with_their_quoted_commas(
    shared_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "slivertune"):
        splits = splits_from(shared_data / "e2e" / "devset.csv", eval_fraction=0.1)
    assert "held out 467 of 4672 rows for evaluation (seed 0)" in caplog.text
    assert (len(splits["train"]), len(splits["eval"])) == (4205, 467)
    by_number = {row[ROW_COLUMN]: row for split in splits.values() for row in split}
    assert by_number[0]["mr"] == "name[Alimentum], area[city centre], familyFriendly[no]"
    assert by_number[0]["ref"].startswith("There is a place in the city centre, Alimentum,")


def rows_of(path: str | Path, **options: object) -> list[dict[str, object]]:
    return list(load_local(Path(path), ["train"], **options)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.csv", 'text,label\n"one, two",x\nthree,y\n'),
        ("rows.tsv", "text\tlabel\none, two\tx\nthree\ty\n"),
        ("rows.jsonl", '{"text": "one, two", "label": "x"}\n{"text": "three", "label": "y"}\n'),
        ("rows.json", '[{"text": "one, two", "label": "x"}, {"text": "three", "label": "y"}]'),
        ("rows.parquet", None),
    ],
)
def test_every_format_gives_the_same_rows(name: str, text: str | None, tmp_path: Path) -> None:
    expected = [{"text": "one, two", "label": "x"}, {"text": "three", "label": "y"}]
    if text is None:
        datasets.Dataset.from_list(expected).to_parquet(str(tmp_path / name))
    else:
        write(tmp_path / name, text)
    assert rows_of(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "text", "column_names", "expected"),
    [
        (
            "rows.csv",
            "\ufefftext,label\nnull,01\nNA,1.50\n,true\n",
            None,
            [("null", "01"), ("NA", "1.50"), (None, "true")],
        ),
        # A lone quotation mark in a tsv file swallows nothing.
        (
            "rows.tsv",
            'a "quoted word\t0\nplain\t1\n"so" it goes\t0\n',
            ["text", "label"],
            [('a "quoted word', "0"), ("plain", "1"), ('"so" it goes', "0")],
        ),
    ],
)
def test_cells_of_a_table_are_text_as_written(
    name: str, text: str, column_names: list[str] | None, expected: list[tuple[str | None, str]], tmp_path: Path
) -> None:
    rows = rows_of(write(tmp_path / name, text), column_names=column_names)
    assert rows == [{"text": first, "label": second} for first, second in expected]


def test_a_text_file_is_cut_by_line_paragraph_or_not_at_all(tmp_path: Path) -> None:
    file = write(tmp_path / "book.txt", "one\ntwo\n\n\nthree\n")
    assert [row["text"] for row in rows_of(file)] == ["one", "two", "", "", "three"]
    assert [str(row["text"]).strip() for row in rows_of(file, sample_by="paragraph")] == ["one\ntwo", "three"]
    assert len(rows_of(file, sample_by="document")) == 1
    with pytest.raises(ValueError, match=r"sample_by=paragraph is for txt files, and .*rows\.csv is read as csv"):
        rows_of(write(tmp_path / "rows.csv", NUMBERED), sample_by="paragraph")


def test_a_name_with_glob_characters_is_meant_as_written(tmp_path: Path) -> None:
    write(tmp_path / "rows1.csv", "text\nwrong\n")
    assert rows_of(write(tmp_path / "rows[1].csv", "text\nright\n")) == [{"text": "right"}]


def test_a_folder_is_split_by_its_file_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("train-0", "train-1", "dev", "my_test", "notes"):
        write(tmp_path / f"{name}.csv", f"text\n{name}\n")
    with caplog.at_level(logging.WARNING, "slivertune"):
        train, validation, test = load_local(tmp_path, ["train", "validation", "test"])
    assert [list(rows["text"]) for rows in (train, validation, test)] == [["train-0", "train-1"], ["dev"], ["my_test"]]
    assert "left out notes.csv" in caplog.text


def test_a_folder_whose_names_say_nothing_is_all_for_training(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / f"{name}.txt", f"{name}\n")
    assert [row["text"] for row in rows_of(tmp_path)] == ["a", "b"]


def test_what_the_datasets_library_saved_is_read_back(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    rows.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict(fit=rows).save_to_disk(str(tmp_path / "split"))
    assert list(load_local(tmp_path / "plain", ["train"])[0]["text"]) == ["one", "two"]
    assert list(load_local(tmp_path / "split", ["fit"])[0]["text"]) == ["one", "two"]
    with pytest.raises(ValueError, match=r"has no split 'train'\. Use fit"):
        load_local(tmp_path / "split", ["train"])


@pytest.mark.parametrize(
    ("name", "text", "column_names", "message"),
    [
        ("rows.xlsx", "x", None, "the extension '.xlsx', which is not one of .csv, .tsv"),
        ("rows.csv", "", None, "is empty"),
        ("rows.csv", "\n\n", None, "holds only blank lines"),
        ("rows.csv", "text,label\n", None, "has a header line and no rows"),
        (
            "rows.csv",
            "text,label\none,two,three\n",
            None,
            "has 2 column names (text, label) and 3 cells in its first row",
        ),
        ("rows.csv", "text,label\none,two\none,two,three\n", None, "can't be read as csv: ParserError"),
        ("rows.csv", "text,text\none,two\n", None, "'text' is there twice"),
        ("rows.jsonl", '{"text": "one"}\n{"text": \n', None, "can't be read as json"),
        ("rows.parquet", "not parquet", None, "can't be read as parquet"),
        (
            "rows.csv",
            "text,label\none,1\n",
            ["text", "label"],
            "already names the columns ['text', 'label']. Leave out",
        ),
        ("rows.csv", "text,label\none,1\n", ["only"], "has 1 column names (only) and 2 cells"),
        ("rows.txt", "one\n", ["a"], "column_names=['a'] is for csv and tsv files"),
    ],
)
def test_a_malformed_file_is_named(
    name: str, text: str, column_names: list[str] | None, message: str, tmp_path: Path
) -> None:
    file = write(tmp_path / name, text)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        rows_of(file, column_names=column_names)
    assert file in str(raised.value)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".txt", ".json", ".jsonl"])
@pytest.mark.parametrize(
    ("encoding", "place", "named"),
    [
        ("latin-1", "line 1201 has the byte 0xef", "latin1"),
        ("utf-16", "line 1 has a zero byte", "utf-16"),
        ("utf-16-le", "line 1 has a zero byte", "utf-16"),
    ],
)
def test_text_in_another_encoding_is_refused(
    suffix: str, encoding: str, place: str, named: str, tmp_path: Path
) -> None:
    row = '{"text": "%s"}\n' if suffix.startswith(".json") else "%s\n"
    file = tmp_path / f"rows{suffix}"
    # Far behind what a reader looks at first.
    file.write_bytes((row % "plain" * 1200 + row % "na\u00efve").encode(encoding))
    with pytest.raises(ValueError, match=re.escape(f"{file} is not UTF-8 text: {place}")) as refused:
        rows_of(file)
    assert f"Convert it, such as by iconv -f {named} -t utf-8" in str(refused.value)


def test_json_without_a_row_and_parquet_that_was_cut_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole.parquet"
    datasets.Dataset.from_dict({"text": ["one", "two"]}).to_parquet(str(whole))
    cut, blank = tmp_path / "cut.parquet", tmp_path / "blank.jsonl"
    cut.write_bytes(whole.read_bytes()[:-9])
    blank.write_text("\n \n", encoding="utf-8")
    capfd.readouterr()
    with pytest.raises(
        ValueError, match=re.escape(f"{blank} holds only blank lines. Give a file with at least one row")
    ):
        rows_of(blank)
    with pytest.raises(ValueError, match=rf"{re.escape(str(cut))} can't be read as parquet: .*\. Repair the file, or"):
        rows_of(cut)
    assert "Failed" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no data file"),
        ({"a.csv": "text\none\n", "b.csv": "words\ntwo\n"}, r"has the columns \['words'\], .* has \['text'\]"),
        ({"a.csv": "text\none\n", "b.jsonl": '{"text": "two"}\n'}, r"mixes formats \(1 \.csv, 1 \.jsonl\)"),
    ],
)
def test_a_folder_must_hold_one_kind_of_file_with_the_same_columns(
    files: dict[str, str], message: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    with pytest.raises(ValueError, match=message):
        load_local(tmp_path, ["train"])


def test_several_datasets_are_loaded_by_name_and_each_holds_rows_out(tmp_path: Path) -> None:
    one, other = (write(tmp_path / f"{name}.csv", NUMBERED) for name in ("one", "other"))
    loaded = load_datasets(DataArguments(dataset=[one, other], dataset_weights=[1.0, 2.0]), seed=0)
    assert list(loaded) == [one, other]
    assert [(len(splits["train"]), len(splits["eval"])) for splits in loaded.values()] == [(18, 2), (18, 2)]
    assert list(load_datasets(DataArguments(dataset=[one]), seed=0)) == [one]


def test_what_is_said_of_one_kind_of_file_holds_for_those_of_several_datasets(tmp_path: Path) -> None:
    bare = write(tmp_path / "bare.csv", NUMBERED.removeprefix("text\n"))
    book = write(tmp_path / "book.txt", "one\ntwo\n\nthree\n\nfour\n")
    rows = write(tmp_path / "rows.jsonl", '{"text": "a"}\n' * 4)
    other = write(tmp_path / "other.jsonl", '{"text": "a"}\n' * 4)
    options: dict[str, Any] = {"column_names": ["words"], "sample_by": "paragraph"}
    loaded = load_datasets(DataArguments(dataset=[bare, book, rows], **options), seed=0)
    assert [(splits["train"].column_names[0], len(splits["train"])) for splits in loaded.values()] == [
        ("words", 18), ("text", 2), ("text", 3),
    ]  # fmt: skip
    loaded = load_datasets(DataArguments(dataset=[book, rows], eval_file=bare, **options), seed=0)
    assert loaded[bare]["eval"].column_names[0] == "words" and len(loaded[book]["train"]) == 3
    splits = load_splits(DataArguments(dataset=[rows], eval_file=bare, column_names=["text"]), seed=0)
    assert (len(splits["train"]), len(splits["eval"])) == (4, 20)
    for name, value in options.items():
        with pytest.raises(ValueError, match=rf"{name}=.* read as json\. Leave it out"):
            load_datasets(DataArguments(dataset=[rows, other], **{name: value}), seed=0)


def test_datasets_are_looked_for_without_loading_them(tmp_path: Path) -> None:
    check_datasets(DataArguments(dataset=[write(tmp_path / "rows.csv", NUMBERED), str(tmp_path), "owner/name"]))
    check_datasets(DataArguments(dataset=None))
    for name, message in (("row.csv", r"is not there .* did you mean .*rows\.csv"), ("run.yaml", "extension '.yaml'")):
        write(tmp_path / "run.yaml", "seed: 1")
        with pytest.raises(ValueError, match=message):
            check_datasets(DataArguments(dataset=[str(tmp_path / name)]))


def test_an_evaluation_file_takes_the_place_of_all_held_out_rows(tmp_path: Path) -> None:
    one, other = (write(tmp_path / f"{name}.csv", NUMBERED) for name in ("one", "other"))
    evaluation = write(tmp_path / "e.jsonl", '{"question": "a", "answer": "b"}\n')
    loaded = load_datasets(DataArguments(dataset=[one, other], eval_file=evaluation), seed=0)
    assert {name: {split: len(rows) for split, rows in splits.items()} for name, splits in loaded.items()} == {
        one: {"train": 20},
        other: {"train": 20},
        evaluation: {"eval": 1},
    }
    # One of the datasets may be what all are evaluated on, and is trained on nevertheless.
    loaded = load_datasets(DataArguments(dataset=[one, other], eval_file=one), seed=0)
    assert {name: {split: len(rows) for split, rows in splits.items()} for name, splits in loaded.items()} == {
        one: {"train": 20, "eval": 20},
        other: {"train": 20},
    }
