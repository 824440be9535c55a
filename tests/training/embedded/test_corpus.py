import sys
from pathlib import Path

import pytest

from slivertune.training.embedded.corpus import collect_docstrings, reference_splits

LONG = "Says something in at least thirty-two characters"


def test_docstrings_of_modules_classes_and_functions_are_collected_once(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        f'"""{LONG} of a module."""\n'
        f'class C:\n    """{LONG} of a class."""\n    async def f():\n        """{LONG} of an f."""\n'
    )
    (tmp_path / "two.py").write_text(
        f'def g():\n    """{LONG} of an f."""\ndef h():\n    """Short."""\n"""{LONG}, loose."""'
    )
    assert sorted(collect_docstrings(tmp_path)) == [f"{LONG} of {what}." for what in ("a class", "a module", "an f")]


def test_tests_installed_packages_and_broken_files_are_left_out(tmp_path: Path) -> None:
    for folder in ("site-packages", "test", "deep/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "module.py").write_text(f'"""{LONG} in {folder}."""')
    (tmp_path / "broken.py").write_text(f'"""{LONG}."""\ndef (')
    (tmp_path / "latin.py").write_bytes(b'"""' + LONG.encode() + b' \xe9."""')
    (tmp_path / "surrogate.py").write_text(f'"""{LONG} \\ud800."""')
    (tmp_path / "escape.py").write_text(f'"""{LONG} \\d."""')
    assert collect_docstrings(tmp_path) == [f"{LONG} \\d."]


def test_a_python_without_sources_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"without its library's sources.*--model_name_or_path"):
        collect_docstrings(tmp_path)


@pytest.mark.slow
def test_this_python_has_docstrings_enough() -> None:
    assert sum(map(len, collect_docstrings())) > 500_000


def test_the_language_reference_is_split_by_topic() -> None:
    splits = reference_splits()
    train, evaluation = list(splits["train"]["text"]), list(splits["eval"]["text"])
    assert not set(train) & set(evaluation)
    assert 6 * len(evaluation) <= len(train) <= 9 * len(evaluation)
    assert any("iterate over the elements of a sequence" in text for text in [*train, *evaluation])
    assert {name: list(rows["text"]) for name, rows in reference_splits().items()} == {
        "train": train,
        "eval": evaluation,
    }


def test_a_python_without_the_reference_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(RuntimeError, match=r"without pydoc_data\.topics.*--dataset"):
        reference_splits()
