"""Packages as they are uploaded: built by `build`, checked by `twine`, tested from their own folder."""

import re
import tarfile
from datetime import date
from pathlib import Path

import pytest

import slivertune
from tests.helpers.launching import run_python
from tests.helpers.making import make, skip_without_make

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def packages(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source package and the wheel that was built from it, as `python -m build` makes them."""
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation, the environment's own hatchling builds, and no index is asked.
    run_python("-m", "build", "--no-isolation", "--outdir", folder, checkout, cwd=folder)
    return folder


def test_both_packages_pass_the_check_of_the_index(packages: Path) -> None:
    names = {path.name for path in packages.iterdir()}
    version = slivertune.__version__
    assert names == {f"slivertune-{version}.tar.gz", f"slivertune-{version}-py3-none-any.whl"}
    checked = run_python("-m", "twine", "check", "--strict", *sorted(packages.iterdir()), cwd=packages)
    assert checked.stdout.count("PASSED") == 2


def test_the_version_has_one_date(checkout: Path) -> None:
    changelog, cited, readme = (
        (checkout / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff", "README.md")
    )
    dated = re.search(rf"^## \[{re.escape(slivertune.__version__)}\] - (\d{{4}}-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert dated is not None and f"date-released: {dated[1]}\n" in cited
    day = date.fromisoformat(dated[1])
    assert f"State: {slivertune.__version__}, {day.day} {day:%B %Y}." in readme


def test_the_source_package_passes_tests_in_its_own_folder(packages: Path, tmp_path: Path) -> None:
    skip_without_make()
    with tarfile.open(next(packages.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    assert re.search(r"^=* ?\d+ passed", make(root, "test", "ARGS=tests/core -q").splitlines()[-1])
