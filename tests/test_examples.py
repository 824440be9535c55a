"""Every example runs as its first lines say, and prints what they promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT

EXAMPLES = CHECKOUT / "examples"
LAUNCH = ["-m", "accelerate.commands.launch", "--num_processes=1", "--num_machines=1", "--dynamo_backend=no"]
LINE = re.compile(
    r"(?P<method>dense|hift) +(?P<steps>\d+) steps  (?P<seconds>[\d.]+) seconds a step  loss (?P<loss>[\d.]+)  "
    r"on the device: gradients (?P<gradients>[\d.]+) MB, optimizer state (?P<state>[\d.]+) MB"
)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], [*LAUNCH, "--mixed_precision=no"]], ids=["python", "accelerate launch"])
def test_the_accelerate_loop_prints_hift_against_dense(launcher: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            *launcher,
            *[str(EXAMPLES / "accelerate_loop.py"), "--steps=6", "--hidden=32", "--blocks=6", "--length=32"],
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = {line["method"]: line.groupdict() for line in LINE.finditer(done.stdout)}
    assert list(printed) == ["dense", "hift"], done.stdout
    dense, hift = ({key: float(value) for key, value in printed[m].items() if key != "method"} for m in printed)
    assert hift["steps"] == 2 * dense["steps"] == 12
    assert min(dense["seconds"], hift["seconds"], dense["loss"], hift["loss"]) > 0
    # The largest of eight layers against all of them.
    assert 0 < hift["gradients"] < dense["gradients"] / 4
    assert 0 < hift["state"] < dense["state"] / 4
    assert dense["state"] == pytest.approx(2 * dense["gradients"], rel=1e-3), "AdamW keeps two moments"


def test_three_lines_of_the_accelerate_loop_are_marked_as_hifts() -> None:
    text = (EXAMPLES / "accelerate_loop.py").read_text(encoding="utf-8")
    assert re.findall(r"# HiFT, line (\d) of 3$", text, re.MULTILINE) == ["1", "2", "3"]
    assert len(text.splitlines()) < 100


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], [*LAUNCH, "--mixed_precision=no"]], ids=["python", "accelerate launch"])
def test_the_tokentune_loop_prints_a_share_of_the_tokens_against_all(launcher: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            *launcher,
            *[str(EXAMPLES / "tokentune.py"), "--steps=4", "--hidden=32", "--blocks=4", "--length=64"],
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = re.compile(
        r" *(?P<share>\d+)% of the tokens  (?P<seconds>[\d.]+) seconds a step  loss (?P<loss>[\d.]+)  "
        r"activations at the peak (?P<activations>[\d.]+) MB"
    )
    printed = [{key: float(value) for key, value in each.groupdict().items()} for each in line.finditer(done.stdout)]
    assert [each["share"] for each in printed] == [100, 30], done.stdout
    assert 0 < printed[1]["activations"] < 0.5 * printed[0]["activations"]
    assert min(each["loss"] for each in printed) > 0


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
def test_sft_trains_a_small_share_and_its_file_of_deltas_carries_what_was_learned(
    selection: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            *[str(EXAMPLES / "sft.py"), "--steps=30", "--hidden=32", "--blocks=2", "--length=32"],
            f"--selection={selection}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    share = re.search(r"([\d,]+) of ([\d,]+) weights trained; ([\d.]+) kB of deltas", done.stdout)
    losses = re.search(r"loss ([\d.]+) before, ([\d.]+) after; .* model ([\d.]+), removed ([\d.]+)", done.stdout)
    assert share is not None and losses is not None, done.stdout
    trained, total = (int(share[at].replace(",", "")) for at in (1, 2))
    assert 0 < trained < 0.01 * total
    before, after, applied, removed = (float(each) for each in losses.groups())
    assert after < before
    assert (applied, removed) == (after, before)


def test_three_lines_of_the_sft_loop_are_marked() -> None:
    assert re.findall(r"# SFT, line (\d) of 3$", (EXAMPLES / "sft.py").read_text(encoding="utf-8"), re.MULTILINE) == [
        "1",
        "2",
        "3",
    ]


def test_three_lines_of_the_tokentune_loop_are_marked() -> None:
    assert re.findall(
        r"# TokenTune, line (\d) of 3$", (EXAMPLES / "tokentune.py").read_text(encoding="utf-8"), re.MULTILINE
    ) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("launcher", "num_ranks"), [([], 1), (["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"], 2)]
)
def test_the_trainer_learns_with_hift_and_tokentune(launcher: list[str], num_ranks: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            *launcher,
            *[str(EXAMPLES / "trainer_hift.py"), "--steps=12", "--hidden=32", "--blocks=2", "--length=32"],
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(
        r"12 updates of 4 groups in turn on (\d) rank\(s\)  loss ([\d.]+) before, ([\d.]+) after", done.stdout
    )
    assert [int(ranks) for ranks, _, _ in lines] == [num_ranks], done.stdout
    assert float(lines[0][2]) < float(lines[0][1])
    assert (tmp_path / "trainer_hift_run" / "checkpoint-12" / "slivertune_tokens.json").is_file()


def test_three_lines_of_the_trainer_script_are_marked() -> None:
    assert re.findall(
        r"# HiFT, line (\d) of 3$", (EXAMPLES / "trainer_hift.py").read_text(encoding="utf-8"), re.MULTILINE
    ) == ["1", "2", "3"]


def test_the_readme_names_every_example() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert scripts and all(f"`{name}`" in readme for name in scripts)
