import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import slivertune
from tests.helpers.launching import run_python
from tests.helpers.making import without_outer_make

CONSTRAINTS = ("constraints.txt", "constraints-oldest.txt")
HEAVY = ("accelerate", "bitsandbytes", "datasets", "deepspeed", "matplotlib", "numpy", "peft", "torch", "transformers")


# Fresh interpreters import the package that this one imports.
SOURCE_ROOT = Path(slivertune.__file__).resolve().parents[1]


def printed(code: str, *, cwd: Path, import_root: Path = SOURCE_ROOT) -> str:
    """What code prints in a fresh interpreter; `import_root` comes before everything installed."""
    return run_python("-c", code, cwd=cwd, PYTHONPATH=str(import_root)).stdout.strip()


def build(checkout: Path, target: str, folder: Path) -> Path:
    """Build a wheel or sdist of a checkout with the installed hatchling: no isolation, no network."""
    run_python("-m", "hatchling", "build", "-t", target, "-d", folder, cwd=checkout)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "sdist", tmp_path_factory.mktemp("sdist"))


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize(
    "code", ["", "from slivertune.core.presets import preset_path; preset_path('single_gpu_24g');"]
)
def test_a_bare_import_and_finding_a_preset_pull_in_nothing_heavy(code: str, tmp_path: Path) -> None:
    show = f"print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    assert printed(f"import sys, slivertune; {code} {show}", cwd=tmp_path) == ""


def test_a_script_with_its_own_layers_per_group_does_not_import_the_planner(tmp_path: Path) -> None:
    show = "print(*(name for name in sys.modules if name.startswith('slivertune.planning')))"
    assert printed(f"import sys; from slivertune import attach; {show}", cwd=tmp_path) == ""


@pytest.mark.parametrize("name", sorted(slivertune.__all__))
def test_a_public_name_resolves_and_is_listed(name: str) -> None:
    assert name in dir(slivertune)
    value = getattr(slivertune, name)
    assert value is getattr(slivertune, name)
    if name != "__version__":
        assert value.__name__ == name and value.__module__.startswith("slivertune.")


def test_the_names_are_listed_before_they_are_resolved(tmp_path: Path) -> None:
    code = "import slivertune; print(set(slivertune.__all__) <= set(dir(slivertune)), 'HiFT' in vars(slivertune))"
    assert printed(code, cwd=tmp_path) == "True False"


def test_a_name_that_is_not_public_is_an_attribute_error_that_lists_the_public_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Hift'; public names: .*HiFT, HiFTConfig"):
        _ = slivertune.Hift


def test_the_wheel_holds_the_package_the_presets_the_examples_and_nothing_else(wheel: Path, checkout: Path) -> None:
    package = checkout / "integrations" / "slivertune"
    expected = {
        f"slivertune/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.suffix in (".py", ".typed", ".toml", ".json")
    }
    for folder in ("launch", "ds_configs", "examples"):
        here = {f"slivertune/{folder}/{path.name}" for path in (checkout / folder).iterdir() if path.is_file()}
        assert here
        expected |= here
    names = files_of(wheel)
    about = f"slivertune-{slivertune.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(about)} == expected
    assert "slivertune/py.typed" in names and f"{about}licenses/LICENSE" in names


def test_the_wheel_declares_the_command_the_floors_and_the_extras(wheel: Path) -> None:
    about = f"slivertune-{slivertune.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        about_text = archive.read(f"{about}/METADATA").decode()
        commands = archive.read(f"{about}/entry_points.txt").decode()
    assert "slivertune = slivertune.cli:main" in commands
    assert {
        "Requires-Python: >=3.11",
        "License-Expression: Apache-2.0",
        "Requires-Dist: torch>=2.12",
        "Requires-Dist: transformers>=5.16.1",
        "Requires-Dist: accelerate>=1.13",
        *(f"Provides-Extra: {extra}" for extra in ("deepspeed", "bitsandbytes", "peft", "plot", "all", "dev")),
    } <= set(about_text.splitlines())


def test_an_unpacked_wheel_finds_its_own_presets_far_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "from slivertune.core.presets import example_names, preset_names, preset_path; "
        "print(*(preset_path(name) for name in (*preset_names(), *example_names())), sep='\\n')"
    )
    found = [Path(line) for line in printed(code, cwd=tmp_path, import_root=site).splitlines()]
    assert site / "slivertune" / "launch" / "single_gpu_24g.yaml" in found
    assert site / "slivertune" / "ds_configs" / "single_gpu_24g.json" in found
    assert site / "slivertune" / "examples" / "trainer_hift.py" in found
    assert all(path.is_relative_to(site) and path.is_file() for path in found)


def test_the_source_package_holds_what_building_and_testing_need(sdist: Path, checkout: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "Makefile", *CONSTRAINTS} <= names
    for folder in ("integrations", "launch", "ds_configs", "tests"):
        here = {
            path.relative_to(checkout).as_posix()
            for path in (checkout / folder).rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        assert here and here <= names
    assert not [name for name in names if name.startswith((".venv", "runs", "dist"))]


def test_the_citation_names_this_version_and_the_papers_of_the_readme(checkout: Path) -> None:
    cited = yaml.safe_load((checkout / "CITATION.cff").read_text(encoding="utf-8"))
    readme = (checkout / "README.md").read_text(encoding="utf-8")
    assert cited["version"] == slivertune.__version__ and f"State: {slivertune.__version__}," in readme
    assert {each["url"] for each in cited["references"]} == set(re.findall(r"https://arxiv\.org/abs/[\d.]+", readme))


def test_the_source_package_builds_the_same_wheel_as_the_checkout(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (root,) = (tmp_path / "source").iterdir()
    assert files_of(build(root, "wheel", tmp_path / "built")) == files_of(wheel)


def pins_of(path: Path) -> dict[str, str]:
    """Versions by canonical name."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins.items()}


def requirements_of(checkout: Path, *extras: str) -> list[Requirement]:
    """What the package needs, with these extras; what it needs of itself is left out."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = chain(project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras))
    return [each for each in map(Requirement, lines) if each.name != project["name"]]


EXTRAS = ("bitsandbytes", "deepspeed", "peft", "plot")


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_the_pins_satisfy_every_declared_range(name: str, checkout: Path) -> None:
    pins = pins_of(checkout / name)
    for requirement in requirements_of(checkout, *EXTRAS, "docs", "dev"):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(requirement)


def test_the_oldest_pins_are_the_floors(checkout: Path) -> None:
    pins = pins_of(checkout / "constraints-oldest.txt")
    tools = [each for each in requirements_of(checkout, "dev") if each.name in ("torchao", "trl")]
    for requirement in [*requirements_of(checkout, *EXTRAS), *tools]:
        if not requirement.specifier:
            continue
        (floor,) = requirement.specifier
        pin, lowest = (Version(each).release for each in (pins[canonicalize_name(requirement.name)], floor.version))
        assert floor.operator == ">=" and pin[: len(lowest)] == lowest, str(requirement)


def test_the_pins_of_axolotl_are_in_the_declared_ranges(checkout: Path) -> None:
    try:
        theirs = [Requirement(line) for line in metadata.requires("axolotl") or ()]
    except metadata.PackageNotFoundError:
        pytest.skip("axolotl is in the environment of `make test-oldest`")
    ours = {canonicalize_name(each.name): each for each in requirements_of(checkout, *EXTRAS, "dev")}
    needed = [each for each in theirs if each.marker is None or each.marker.evaluate({"extra": ""})]
    pins = {canonicalize_name(each.name): pin for each in needed for pin in each.specifier if pin.operator == "=="}
    assert {"accelerate", "bitsandbytes", "datasets", "peft", "torchao", "transformers", "trl"} <= pins.keys()
    for name in ours.keys() & pins.keys():
        assert ours[name].specifier.contains(pins[name].version), f"axolotl needs {name}{pins[name]}, not {ours[name]}"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_train_installs_no_development_tools_and_make_test_does(checkout: Path, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", *CONSTRAINTS):
        shutil.copy(checkout / name, tmp_path / name)

    def commands(target: str) -> str:
        call, own = ["make", "-n", target], without_outer_make()
        return subprocess.run(call, cwd=tmp_path, env=own, capture_output=True, text=True, check=True).stdout

    assert "'.[all]'" in commands("train") and "dev]" not in commands("train")
    assert all("'.[all,dev]'" in commands(target) for target in ("test", "lint", "format"))
    assert all("oldest" not in commands(target) for target in ("train", "test", "lint", "format"))
    oldest = commands("test-oldest")
    assert "--constraint constraints-oldest.txt --no-deps axolotl" in oldest and "constraints.txt" not in oldest
    assert " llamafactory " in oldest
    assert "--no-deps axolotl" in commands("test-all")
    # A second call installs nothing.
    for name in (".venv/.installed", ".venv/.installed-dev", ".venv-oldest/.installed-axolotl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert all(
        "pip" not in commands(target) for target in ("train", "test", "test-all", "test-oldest", "lint", "format")
    )


def test_no_message_names_an_extra_of_this_package_which_is_not_published(checkout: Path) -> None:
    sources = (checkout / "integrations").rglob("*.py")
    assert [path for path in sources if re.search(r"slivertune\[|the extra \w", path.read_text(encoding="utf-8"))] == []
