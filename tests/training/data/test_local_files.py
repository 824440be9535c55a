import logging
import re
from pathlib import Path

import datasets
import pytest

from slivertune.training.data.local_files import load_local
from tests.training.tiny import write


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
    with pytest.raises(ValueError, match="has no split 'train'; it has fit"):
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
            "already names the columns ['text', 'label']; leave out",
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


@pytest.mark.parametrize(
    ("name", "message"), [("rows.csv", "is not UTF-8 text .* iconv"), ("rows.txt", "can't be read as text: Unicode")]
)
def test_text_in_another_encoding_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes("text\nna\u00efve\n".encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / name)


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
