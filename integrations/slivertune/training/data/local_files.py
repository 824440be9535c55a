"""Rows of local csv, tsv, json, jsonl, txt and parquet files, or of a folder of them, by the datasets library."""

import csv
import glob
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from slivertune.core.suggestions import did_you_mean
from slivertune.core.text_encoding import find_not_utf8
from slivertune.training.data.json_rows import load_json

logger = logging.getLogger(__name__)

FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".txt": "text", ".parquet": "parquet"}
"""File extension -> reader of the datasets library."""

_SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "devset"), "validation"),
    **dict.fromkeys(("test", "testing", "testset", "eval", "evaluation"), "test"),
}
_FEW_BYTES = 4096
_NO_ROWS = "corresponds to no data"
"""Part of the error of the datasets library for a slice that begins after the last row."""


def load_local(
    path: Path,
    splits: list[str],
    *,
    column_names: list[str] | None = None,
    sample_by: str = "line",
    cache_dir: str | None = None,
) -> list[Any]:
    """Load splits of a file or folder.

    Cells of csv and tsv files stay text as written: "01" and "null" are strings, and an empty cell is null. A tsv file
    has no quoting, a csv file the usual one. Values of json files stay as written, too (`json_rows`).

    A file has one split, `train`. The files of a folder are assigned to train, validation and test by their names
    (dev.tsv is validation; files without such a name are skipped), or all to train if no name matches. A folder written
    by `datasets.Dataset.save_to_disk` is read as well.

    Args:
        path: Existing file or folder.
        splits: Names, or slices such as `train[:100]`, one per returned dataset.
        column_names: Names of the columns, for csv and tsv files without a header line.
        sample_by: Unit of a row in a txt file: a "line", a "paragraph" or the whole "document".
        cache_dir: Folder for prepared data. The default is the datasets library's own cache.

    Returns:
        One `datasets.Dataset` per split.

    Raises:
        ValueError: If the extension is unknown, a file is malformed or empty, or a split does not exist.
    """
    if path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
        return _load_saved(path, splits)
    files_of_split = _files_of_folder(path) if path.is_dir() else {"train": [path]}
    files = [file for group in files_of_split.values() for file in group]
    reader = reader_of(files)
    options: dict[str, Any] = {}
    if reader != "text" and sample_by != "line":
        raise ValueError(f"sample_by={sample_by} is for txt files, and {files[0]} is read as {reader}. Leave it out")
    if reader == "csv":
        options = _csv_options(files, column_names)
    elif column_names is not None:
        raise ValueError(
            f"column_names={column_names} is for csv and tsv files without a header line, and {files[0]} is read as "
            f"{reader}. Leave it out"
        )
    elif reader == "text":
        options = {"sample_by": sample_by, "encoding": "utf-8-sig"}
    _check_splits(path, splits, sorted(files_of_split))
    # The reader takes glob patterns. A name such as data[1].csv is meant literally.
    patterns = {name: [glob.escape(str(file.resolve())) for file in group] for name, group in files_of_split.items()}
    try:
        with _quiet_readers():
            if reader == "json":
                return load_json(patterns, splits, cache_dir)
            options |= {"data_files": patterns, "split": splits, "cache_dir": cache_dir}
            return list(datasets.load_dataset(reader, **options))
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        if _NO_ROWS in str(error):
            slices = " or ".join(repr(split) for split in splits if "[" in split)
            raise ValueError(f"split {slices} of {path} has no rows. Give a slice within its rows") from error
        raise ValueError(
            f"{path} can't be read as {reader}: {_reason(error)}. Repair the file, or write it again as another format"
        ) from error


@contextmanager
def _quiet_readers() -> Iterator[None]:
    """Silence the readers of the datasets library, which log the errors that they raise."""
    readers = logging.getLogger("datasets.packaged_modules")
    level = readers.level
    readers.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        readers.setLevel(level)


def _load_saved(path: Path, splits: list[str]) -> list[Any]:
    saved = datasets.load_from_disk(str(path))
    return choose_splits(path, saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}, splits)


def choose_splits(name: Path | str, by_name: Mapping[str, Any], splits: list[str]) -> list[Any]:
    """Return splits by their names.

    Args:
        name: Name of the dataset, for people.
        by_name: All splits of the dataset.
        splits: Names of those to return. Slices are not taken.

    Raises:
        ValueError: If a split does not exist.
    """
    for split in splits:
        if split not in by_name:
            raise ValueError(f"{name} has no split {split!r}. Use {', '.join(by_name)} (it takes no slices)")
    return [by_name[split] for split in splits]


def _files_of_folder(folder: Path) -> dict[str, list[Path]]:
    files = sorted(
        file for file in folder.iterdir() if file.suffix.lower() in FORMATS and not file.name.startswith(".")
    )
    if not files:
        raise ValueError(f"folder {folder} holds no data file. Put in {', '.join(FORMATS)} files, or name a file")
    files_of_split: dict[str, list[Path]] = {}
    for file in files:
        words = re.findall("[a-z]+", file.stem.lower())
        files_of_split.setdefault(next(filter(None, map(_SPLIT_OF_WORD.get, words)), ""), []).append(file)
    unnamed = files_of_split.pop("", [])
    if unnamed and files_of_split:
        names = ", ".join(file.name for file in unnamed)
        logger.warning("%s: left out %s, whose names contain neither train, validation nor test", folder, names)
    return files_of_split or {"train": unnamed}


def reader_of(files: list[Path]) -> str:
    """Return the reader of the datasets library for files of one format.

    Args:
        files: Existing files.

    Raises:
        ValueError: If a file is empty, of an unknown format or not text in UTF-8, or if the formats differ.
    """
    for file in files:
        if file.suffix.lower() not in FORMATS:
            raise ValueError(
                f"{file} has the extension {file.suffix!r}, which is not one of {', '.join(FORMATS)}. Convert it or "
                "rename it"
            )
        if file.stat().st_size == 0:
            raise ValueError(f"{file} is empty. Give a file with at least one row")
        if file.suffix.lower() != ".parquet" and (not_text := find_not_utf8(file)) is not None:
            raise ValueError(not_text)
        if file.stat().st_size < _FEW_BYTES and not file.read_bytes().strip():
            raise ValueError(f"{file} holds only blank lines. Give a file with at least one row")
    suffixes = Counter(file.suffix.lower() for file in files)
    if len(suffixes) > 1:
        found = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.items())
        raise ValueError(f"folder {files[0].parent} mixes formats ({found}). Keep one, or name a file")
    return FORMATS[files[0].suffix.lower()]


def _csv_options(files: list[Path], column_names: list[str] | None) -> dict[str, Any]:
    # A tsv file has no quoting: a lone quotation mark must not swallow the lines after it.
    delimiter, quoting = ("\t", csv.QUOTE_NONE) if files[0].suffix.lower() == ".tsv" else (",", csv.QUOTE_MINIMAL)
    names, *others = (_header(file, delimiter, quoting, column_names) for file in files)
    for file, header in zip(files[1:], others, strict=True):
        if header != names:
            raise ValueError(f"{file} has the columns {header}, and {files[0]} has {names}. Give both the same columns")
    # Every cell is text. Guessed types would turn "null" into nothing and "01" into 1, and change between pieces.
    return {
        "column_names": column_names,
        "features": datasets.Features({name: datasets.Value("string") for name in names}),
        "sep": delimiter,
        "quoting": int(quoting),
        "keep_default_na": False,
        "na_values": [""],
        "encoding": "utf-8-sig",
    }


def _header(file: Path, delimiter: str, quoting: Any, column_names: list[str] | None) -> list[str]:
    """Return a file's column names, checked against the width of the first row (the reader does not check it)."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            records = (record for record in csv.reader(lines, delimiter=delimiter, quoting=quoting) if record)
            first, second = [*islice(records, 2), [], []][:2]
    except csv.Error as error:
        raise ValueError(
            f"{file} can't be read as csv: {error}. Repair the file, or write it again as another format"
        ) from error
    header, row = (first, second) if column_names is None else (column_names, first)
    if not first:
        raise ValueError(f"{file} holds only blank lines. Give a file with at least one row")
    if first == column_names:
        raise ValueError(f"the first line of {file} already names the columns {column_names}. Leave out --column_names")
    if not row:
        raise ValueError(
            f"{file} has a header line and no rows. If its only line is data, name the columns with --column_names"
        )
    if len(header) != len(row):
        raise ValueError(
            f"{file} has {len(header)} column names ({', '.join(header)}) and {len(row)} cells in its first row. "
            "Give one name per cell"
        )
    repeated = [name for name, count in Counter(header).items() if count > 1]
    if repeated:
        raise ValueError(
            f"the columns of {file} are {header}, and {repeated[0]!r} is there twice. Rename one, or name "
            "the columns of a file without a header line with --column_names"
        )
    return header


def _check_splits(path: Path, splits: list[str], there: list[str]) -> None:
    for split in splits:
        try:
            datasets.ReadInstruction.from_spec(split)
        except ValueError as error:
            raise ValueError(
                f"{path}: split {split!r} is not a slice. Write it as train[:100] or train[:10%]"
            ) from error
        for part in split.split("+"):
            if part.split("[")[0].strip() not in there:
                raise ValueError(
                    f"{path} has no split {part!r}. Use {', '.join(there)}, or --eval_file for other evaluation rows "
                    f"(a file has one split, train){did_you_mean(part.split('[')[0], there)}"
                )


def _reason(error: BaseException) -> str:
    """Return the innermost cause in one line. The outer errors only say that reading failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
