from pathlib import Path

import pytest

from tests.mutants import PACKAGE, drawn, killer_of, mutants_of

FILE = PACKAGE / "area" / "sums.py"
SOURCE = '''"""A docstring of 3 sentences."""


def largest(values: list[int], least: int = 7) -> int:
    """Return the largest."""
    found = least
    for value in values:
        if value > found:
            found = value
    return found
'''
TEST = """from slivertune.area.sums import largest


def test_the_largest() -> None:
    assert largest([8, 9]) == 9
"""


def checkout_with(folder: Path, source: str) -> Path:
    tests = {Path("tests/area/test_sums.py"): TEST, Path("tests/test_all.py"): TEST}
    for path, text in {PACKAGE / "__init__.py": "", FILE: source, **tests}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["(a <= b)"]),
        ("a is not b", ["(a is b)"]),
        ("a and b", ["(a or b)"]),
        ("a - b", ["(a + b)"]),
        ("not a", ["(a)"]),
        ("f(a, b)", ["(a)"]),
        ("f()", ["(None)"]),
        ("a = True", ["(False)"]),
        ("a = 2", ["(3)"]),
        ("a = 'name'", ["('namex')"]),
        ("a = 'é' < b", ["('é' <= b)", "('éx')"]),
        ("a = 'a whole sentence'", []),
        ("a: 'int' = b", []),
        ("def f(a: 'int') -> 'int':\n    '''Text.'''\n    return f'{a + 1}'", []),
    ],
)
def test_one_thing_is_changed(source: str, expected: list[str], tmp_path: Path) -> None:
    found = mutants_of(FILE, checkout_with(tmp_path, source))
    mutants = [mutant for each in found.values() for mutant in each]
    assert [mutant.new for mutant in mutants] == expected
    for mutant in mutants:
        changed = mutant.applied(source.encode()).decode()
        assert changed == source.replace(mutant.old, mutant.new, 1) != source


def test_a_line_is_found_again_under_lines_that_another_commit_lacks(tmp_path: Path) -> None:
    old = checkout_with(tmp_path / "old", SOURCE)
    new = checkout_with(tmp_path / "new", SOURCE.replace("\n\ndef", "\nOTHER = 4 + 5\n\n\ndef").replace(" = 7", " = 6"))
    ((line, (mutant, moved)),) = drawn([old, new], seed=1, num_mutants=9, folders=["area"])
    assert line.text == "if value > found:" and moved.row == mutant.row + 2
    assert drawn([old, new], seed=1, num_mutants=9, folders=["elsewhere"]) == []
    lines = [{line.text for _ in range(2) for line, _ in drawn([new], seed, 1, [])} for seed in range(9)]
    assert all(len(each) == 1 for each in lines) and len(set.union(*lines)) > 1


@pytest.mark.slow
def test_the_test_that_notices_is_returned_and_the_file_is_as_before(tmp_path: Path) -> None:
    checkout = checkout_with(tmp_path, SOURCE)
    mutants = {mutant.new: mutant for each in mutants_of(FILE, checkout).values() for mutant in each}
    assert killer_of(checkout, FILE, mutants["(value >= found)"], num_workers=0) is None
    broken = mutants["(value >= found)"]._replace(new="value < found")
    assert killer_of(checkout, FILE, broken, num_workers=0) == "tests/area/test_sums.py::test_the_largest"
    (checkout / "tests/area/test_sums.py").write_text("def test_nothing() -> None: ...\n", encoding="utf-8")
    assert killer_of(checkout, FILE, broken, num_workers=0) == "tests/test_all.py::test_the_largest"
    assert (checkout / FILE).read_text(encoding="utf-8") == SOURCE
