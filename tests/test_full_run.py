import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.full_run import (
    CHECKOUT,
    OLDEST_PYTHON,
    PARTS,
    RECORD,
    FullRunError,
    check_record,
    clean_tree,
    command_of,
    count_outcomes,
    paths_of,
)


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "a commit")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "tests").mkdir()
    (tmp_path / "code.py").write_text("a = 1\n", encoding="utf-8")
    commit(tmp_path)
    return tmp_path


def write_record(repository: Path, **changes: Any) -> None:
    record = {
        "tree": clean_tree(repository),
        "parts": {part: {"passed": 3, "failed": 0, "skipped": 0, "seconds": 1} for part in PARTS},
        **changes,
    }
    (repository / RECORD).write_text(json.dumps(record), encoding="utf-8")


def test_every_test_is_in_one_part_and_one_alone() -> None:
    files = Counter(
        file
        for part in PARTS
        for path in paths_of(part)
        for file in ([path] if path.suffix else (CHECKOUT / path).rglob("test_*.py"))
    )
    assert Counter({CHECKOUT / file: count for file, count in files.items()}) == Counter(
        (CHECKOUT / "tests").rglob("test_*.py")
    )


def test_the_oldest_versions_have_an_environment_of_their_own_and_all_tests_but_the_slow(tmp_path: Path) -> None:
    with pytest.raises(FullRunError, match=r"there is no \.venv-oldest/bin/python; run it by make test-all"):
        command_of("oldest", 2, tmp_path)
    (tmp_path / OLDEST_PYTHON).parent.mkdir(parents=True)
    (tmp_path / OLDEST_PYTHON).touch()
    python, *options = command_of("oldest", 2, tmp_path)
    assert python == str(tmp_path / OLDEST_PYTHON)
    assert options == ["-m", "pytest", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder", "-m", "not slow"]
    assert command_of("planning", 3)[0] == sys.executable and command_of("planning", 3)[-1] == "tests/planning"


def test_a_tree_that_is_not_clean_is_not_run(repository: Path) -> None:
    tree = clean_tree(repository)
    write_record(repository)
    commit(repository)
    assert clean_tree(repository) == tree  # a record of some parts may be committed, and the others run later
    (repository / "new.py").touch()
    with pytest.raises(FullRunError, match=r"not clean: new\.py; commit or remove it"):
        clean_tree(repository)
    commit(repository)
    assert clean_tree(repository) != tree


def test_a_record_of_the_commit_before_that_is_committed_alone_passes(repository: Path) -> None:
    write_record(repository)
    commit(repository)
    check_record(repository)
    (repository / "code.py").write_text("a = 2\n", encoding="utf-8")
    commit(repository)
    check_record(repository)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tree": "0" * 40}, "is of tree 0000"),
        ({"parts": {part: {"failed": 1} for part in PARTS}}, r"parts with failures: \['methods'"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(changes: dict[str, Any], message: str, repository: Path) -> None:
    write_record(repository, **changes)
    commit(repository)
    with pytest.raises(FullRunError, match=message):
        check_record(repository)


def test_a_record_beside_another_change_is_refused(repository: Path) -> None:
    write_record(repository)
    (repository / "code.py").write_text("a = 2\n", encoding="utf-8")
    commit(repository)
    with pytest.raises(FullRunError, match=r"together with code\.py; commit it alone"):
        check_record(repository)


def test_outcomes_are_counted_from_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = "<failure/>", "<error/>", "<skipped/>", "", ""
    report.write_text(
        f"<testsuites>{''.join(f'<testcase>{case}</testcase>' for case in cases)}</testsuites>", encoding="utf-8"
    )
    assert count_outcomes(report) == {"passed": 2, "failed": 2, "skipped": 1}


@pytest.mark.skipif(not (CHECKOUT / ".git").exists(), reason="not a git checkout")
def test_the_record_of_this_repository_is_of_the_commit_before() -> None:
    if git(CHECKOUT, "rev-list", "--count", "HEAD", "-2") == "1":
        pytest.skip("a clone of one commit")
    check_record(CHECKOUT)
