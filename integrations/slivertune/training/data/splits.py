"""Loading of a dataset, from disk or the Hugging Face hub, as a training and an evaluation split.

Local csv, tsv, json, jsonl, txt and parquet files, or a folder of them, are read through the datasets library.
"""

import csv
import dataclasses
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
import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from slivertune.core.suggestions import closest, did_you_mean
from slivertune.core.text_encoding import find_not_utf8
from slivertune.core.user_path import user_path
from slivertune.training.data.columns import number_rows
from slivertune.training.data.json_rows import load_json
from slivertune.training.embedded.built_in import BUILT_IN, check_built_in
from slivertune.training.options.arguments import DataArguments

logger = logging.getLogger(__name__)

FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".txt": "text", ".parquet": "parquet"}
"""File extension -> reader of the datasets library."""

_SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "devset"), "validation"),
    **dict.fromkeys(("test", "testing", "testset", "eval", "evaluation"), "test"),
}
_FEW_BYTES = 4096
_PROBE_SECONDS = 10.0
"""Timeout, in seconds, of the request that checks whether the hub is reachable."""
_HUB_ID = re.compile(r"[\w][\w.\-]*(/[\w][\w.\-]*)?")


def load_splits(arguments: DataArguments, *, seed: int) -> Any:
    """Load the training and evaluation rows of one dataset.

    A local path takes precedence over the hub. Without `eval_split` and `eval_file`, `eval_fraction` of the training
    rows, at least one, is drawn with the seed and held out.

    Args:
        arguments: Settings that name the splits, and one local csv, tsv, json, jsonl, txt or parquet file, a folder of
            such files, a hub id, or a built-in dataset, which has a split `eval`. Slices such as `train[:1000]` work.
        seed: Seed for the choice of held-out rows.

    Returns:
        A `datasets.DatasetDict` with `train` and `eval`. Rows keep their number in the split from which they come.

    Raises:
        ValueError: If not exactly one dataset is named, if the dataset, a split or a file is missing or can't be read,
            or if there are too few rows.
        ConnectionError: If the hub can't be reached.
    """
    if arguments.dataset is None or len(arguments.dataset) != 1:
        raise ValueError(f"dataset={arguments.dataset} names no rows. Give --dataset a hub id or a local file")
    (dataset,) = arguments.dataset
    eval_split = arguments.eval_split
    if eval_split is None and arguments.eval_file is None and dataset in BUILT_IN:
        eval_split = "eval"
    splits = [arguments.train_split] if eval_split is None else [arguments.train_split, eval_split]
    loaded = _load_rows(dataset, splits, _for_dataset(dataset, arguments))
    if arguments.eval_file is not None:
        loaded.append(_load_eval_file(arguments.eval_file, arguments))
    if len(loaded) == 1:
        return _hold_out(loaded[0], arguments.eval_fraction, seed)
    return datasets.DatasetDict(train=loaded[0], eval=loaded[1])


def load_datasets(arguments: DataArguments, *, seed: int) -> dict[str, Any]:
    """Load the rows of every named dataset.

    Args:
        arguments: Settings that name one or more datasets. The split settings apply to each. An `eval_file` replaces
            the evaluation rows of all.
        seed: Seed for the choice of held-out rows in each dataset.

    Returns:
        Results of `load_splits` by dataset name. With several datasets and an `eval_file`, each has only `train`, and
        the file comes last and has only `eval`, unless it is one of the datasets.

    Raises:
        ValueError: As `load_splits`.
        ConnectionError: As `load_splits`.
    """
    names, eval_file = arguments.dataset or [], arguments.eval_file
    if len(names) < 2:
        return {name: load_splits(arguments, seed=seed) for name in names}
    if eval_file is None:
        return {
            name: load_splits(
                dataclasses.replace(_for_dataset(name, arguments), dataset=[name], dataset_weights=None), seed=seed
            )
            for name in names
        }
    sources = {
        name: datasets.DatasetDict(train=_load_rows(name, [arguments.train_split], _for_dataset(name, arguments))[0])
        for name in names
    }
    sources.setdefault(eval_file, datasets.DatasetDict())["eval"] = _load_eval_file(eval_file, arguments)
    return sources


def check_datasets(arguments: DataArguments) -> None:
    """Check the names of the datasets, without loading anything.

    Args:
        arguments: Settings that name local files, folders or hub ids.

    Raises:
        ValueError: If a name is neither built in, nor an existing path, nor a hub id, or if a file is empty or of an
            unknown format.
    """
    for name in arguments.dataset or []:
        path = user_path(name)
        check_built_in(name)
        if name in BUILT_IN:
            continue
        if path.is_file():
            _reader_of([path])
        elif not path.exists():
            _check_hub_id(name)


def _for_dataset(name: str, arguments: DataArguments) -> DataArguments:
    """Adapt the settings to one of several datasets. Options for one kind of file apply only to it, if there is any."""
    named = [*(arguments.dataset or []), *filter(None, [arguments.eval_file])]

    def is_for(suffixes: tuple[str, ...]) -> bool:
        return _may_hold(name, suffixes) or not any(_may_hold(each, suffixes) for each in named)

    column_names = arguments.column_names if is_for((".csv", ".tsv")) else None
    return dataclasses.replace(
        arguments, column_names=column_names, sample_by=arguments.sample_by if is_for((".txt",)) else "line"
    )


def _may_hold(name: str, suffixes: tuple[str, ...]) -> bool:
    """Check whether a dataset is a file with one of the suffixes, or a folder, which may contain such files."""
    path = user_path(name)
    return path.is_dir() or path.suffix.lower() in suffixes


def _load_rows(dataset: str, splits: list[str], arguments: DataArguments) -> list[Any]:
    path, config, names = user_path(dataset), arguments.dataset_config, arguments.column_names
    check_built_in(dataset)
    if dataset in BUILT_IN:
        loaded = _load_built_in(dataset, splits, arguments)
    elif path.exists():
        if config is not None:
            raise ValueError(f"dataset_config={config!r} is for hub datasets, and {path} is local. Leave it out")
        loaded = load_local(path, splits, column_names=names, **_reader_options(arguments))
    else:
        _check_hub_id(dataset)
        if names is not None:
            raise ValueError(
                f"column_names={names} is for local csv and tsv files, and {dataset!r} is on the hub. Leave it out"
            )
        if arguments.sample_by != "line":
            raise ValueError(
                f"sample_by={arguments.sample_by} is for local txt files, and {dataset!r} is on the hub. Leave it out"
            )
        loaded = _load_hub(dataset, config, splits, arguments.dataset_cache_dir)
    return [_with_rows(rows, dataset, split) for rows, split in zip(loaded, splits, strict=True)]


def _load_built_in(dataset: str, splits: list[str], arguments: DataArguments) -> list[Any]:
    for name, default in (("dataset_config", None), ("column_names", None), ("sample_by", "line")):
        value = getattr(arguments, name)
        if value != default:
            raise ValueError(f"{name}={value} is for other data than {dataset}, which is built in. Leave it out")
    return _choose_splits(dataset, BUILT_IN[dataset].load(), splits)


def _load_eval_file(eval_file: str, arguments: DataArguments) -> Any:
    file = user_path(eval_file)
    if not file.is_file():
        raise ValueError(f"eval_file {eval_file!r} is no file. Give an existing {', '.join(FORMATS)} file")
    arguments = _for_dataset(eval_file, arguments)
    (rows,) = load_local(file, ["train"], column_names=arguments.column_names, **_reader_options(arguments))
    return _with_rows(rows, eval_file, "train")


def _reader_options(arguments: DataArguments) -> dict[str, Any]:
    return {"sample_by": arguments.sample_by, "cache_dir": arguments.dataset_cache_dir}


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
    reader = _reader_of(files)
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
    return _choose_splits(path, saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}, splits)


def _choose_splits(name: Path | str, by_name: Mapping[str, Any], splits: list[str]) -> list[Any]:
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


def _reader_of(files: list[Path]) -> str:
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


def _check_hub_id(dataset: str) -> None:
    looks_local = Path(dataset).suffix.lower() in FORMATS or dataset.startswith((".", "/", "~"))
    if looks_local or not _HUB_ID.fullmatch(dataset):
        raise ValueError(
            f"dataset {dataset!r} is not there (looked for from {Path.cwd()}). Give an existing "
            f"{', '.join(FORMATS)} file, a folder of such, or a hub id (name or owner/name){_named_beside(dataset)}"
        )


def _named_beside(dataset: str) -> str:
    """Suggest a file with a similar name, if there is one."""
    path = user_path(dataset)
    there = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = closest(path.name, there)
    return "" if near is None else f"; did you mean {path.parent / near}?"


def _with_rows(rows: Any, dataset: str, split: str) -> Any:
    if len(rows) == 0:
        raise ValueError(f"split {split!r} of {dataset!r} has no rows. Name another split or file")
    return number_rows(rows)


def _hold_out(rows: Any, fraction: float, seed: int) -> Any:
    num_held_out = max(1, round(fraction * len(rows)))
    if num_held_out >= len(rows):
        raise ValueError(
            f"{len(rows)} rows are too few to hold out {fraction:g} of them for evaluation. Name evaluation rows with "
            "--eval_split or --eval_file, lower --eval_fraction, or cut a txt file finer with --sample_by"
        )
    logger.info("held out %d of %d rows for evaluation (seed %d)", num_held_out, len(rows), seed)
    parts = rows.train_test_split(test_size=num_held_out, seed=seed)
    return datasets.DatasetDict(train=parts["train"], eval=parts["test"])


def _load_hub(dataset: str, config: str | None, splits: list[str], cache_dir: str | None) -> list[Any]:
    """Load splits of a hub dataset.

    One request first checks that the hub is reachable, since the datasets library retries an unreachable hub for half
    a minute. If it is not, a dataset that was loaded before is taken from the cache.
    """
    _check_reachable(dataset, cache_dir)
    try:
        return list(datasets.load_dataset(dataset, config, split=splits, cache_dir=cache_dir))
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"dataset {dataset!r} (configuration {config!r}, splits {', '.join(splits)}) can't be loaded from "
            f"the hub: {' '.join(str(error).split())}. See --dataset_config, --train_split and --eval_split"
        ) from error


def _check_reachable(dataset: str, cache_dir: str | None) -> None:
    try:
        huggingface_hub.HfApi().dataset_info(dataset, timeout=_PROBE_SECONDS)
    except GatedRepoError:
        # The datasets library explains how to ask for access.
        return
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"dataset {dataset!r} is neither a local file or folder nor a dataset that the hub shows you. Check the "
            f"spelling, or log in with `hf auth login` if it is private{_named_beside(dataset)}"
        ) from error
    except HfHubHTTPError:
        # The hub is reachable, and the datasets library reports the refusal.
        return
    # Each transport raises its own errors, and all mean the same.
    except Exception as error:
        if _is_cached(dataset, cache_dir):
            logger.warning("the hub can't be reached (%s), so %s is read from the cache", error, dataset)
            return
        raise ConnectionError(
            f"dataset {dataset!r} is no local file or folder, and the hub can't be reached to look for it "
            f"({type(error).__name__}: {error}). Name a local file, or connect once so that it is cached"
            f"{_named_beside(dataset)}"
        ) from error


def _is_cached(dataset: str, cache_dir: str | None) -> bool:
    owner, _, name = dataset.rpartition("/")
    folder = datasets.naming.camelcase_to_snakecase(name)
    root = user_path(cache_dir or datasets.config.HF_DATASETS_CACHE)
    return (root / (f"{owner}___{folder}" if owner else folder)).is_dir()
