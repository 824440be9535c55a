import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from slivertune import __version__
from slivertune.cli import main
from slivertune.deltas import merge as merging
from slivertune.training.folders import newest_whole
from slivertune.training.run import describe_interruption
from tests.deltas.files import UP, bits_of, damage, deltas_of, naive_sum, same_bits, write_deltas
from tests.helpers.models import tiny_llama
from tests.training.tiny_runs import UNMEASURED, Runs, complaint, results_of


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--version"], [f"slivertune {__version__}\n"]),
        ([], ["train", "merge", "compare", "report"]),
        (["--help"], ["train", "merge", "unmerge", "path", "--version", "--debug"]),
        (["train", "--help"], ["--layers_per_group", "examples:"]),
        (["train", "--help", "all"], ["--layers_per_group", "--fsdp_config"]),
        (["train", "run.yaml", "--help"], ["--layers_per_group"]),
        (["plan", "--help"], ["--layers_per_group", "examples:"]),
    ],
)
def test_version_and_help(arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out = capsys.readouterr().out
    assert stop.value.code == 0 and all(part in out for part in parts)
    assert arguments != ["--version"] or out == parts[0]


def test_the_light_commands_import_nothing_heavy() -> None:
    code = (
        "import sys; from slivertune.cli import main; main(['path', 'single_gpu_24g']);"
        "sys.exit(bool({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.slow
def test_merge_imports_no_transformers_and_its_help_not_even_torch(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    write_deltas(tmp_path / "deltas", model, base_model_name="base")
    for arguments, heavy in (
        (["merge", "--help"], {"torch", "transformers", "datasets", "safetensors"}),
        (["merge", "deltas", "--output_dir", "merged"], {"transformers", "datasets", "accelerate"}),
    ):
        code = (
            f"import sys; from slivertune.cli import main; sys.argv = ['slivertune', *{arguments}]\n"
            f"try: code = main()\nexcept SystemExit as stop: code = stop.code\n"
            f"sys.exit(code or ' '.join({heavy} & set(sys.modules)) or 0)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr


def test_path_prints_where_a_preset_lies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["path", "single_gpu_24g"]) == 0
    out = capsys.readouterr().out
    assert Path(out.strip()).is_file() and out.endswith("single_gpu_24g.yaml\n")


def test_the_help_of_path_lists_every_file_that_it_finds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["path", "--help"])
    out = "".join(capsys.readouterr().out.split())  # names may be broken at the ends of lines
    top = Path(__file__).parents[1]
    found = [path.name for path in (top / "launch").iterdir() if path.suffix in (".yaml", ".slurm", ".hostfile")]
    found += [path.name for path in (top / "examples").iterdir() if path.suffix in (".py", ".ipynb")]
    assert len(found) > 3 and [name for name in found if name not in out] == []
    assert [name for name in found if main(["path", name]) != 0] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "slivertune: error: argument COMMAND: invalid choice: 'trian' (choose from"),
        (["trian"], "); did you mean train?; see slivertune --help\n"),
        (["merge", "a", "--output_dir", "b", "--alow_quantized_base"], "; did you mean --allow_quantized_base?; see"),
        (
            ["unmerge", "a", "--output", "b", "--output_dir", "c"],
            "slivertune unmerge: error: unrecognized arguments: --",
        ),
    ],
)
def test_a_mistyped_command_or_option_is_one_line_that_says_what_was_meant(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1


@pytest.mark.parametrize(("name", "said"), [("nowhere", ""), ("single_gpu_24", "did you mean single_gpu_24g.yaml?")])
def test_an_unknown_preset_is_one_line_and_code_2(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = complaint(capsys, ["path", name])
    assert re.fullmatch(rf"slivertune path: error: there is no preset '{name}'\. .*{re.escape(said)}.*\n", error)


@pytest.mark.parametrize(
    "arguments",
    [
        ["dance"],
        ["path"],
        ["merge", "deltas"],
        ["merge", "--output_dir", "out"],
        ["unmerge", "merged"],
        ["unmerge", "merged", "--model_name_or_path", "base", "--output_dir", "out"],
    ],
)
def test_an_unknown_command_or_one_without_its_arguments_is_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "magic"], "argument --method: invalid choice: 'magic'"),
        (["--nothing"], "unrecognized arguments: --nothing"),
        (
            ["--learning_rat", "1"],
            "unrecognized arguments: --learning_rat 1; did you mean --learning_rate?; see slivert",
        ),
        (["absent.yaml"], "config file absent.yaml is not there"),
        (["chats.jsonl"], "'chats.jsonl' is not a config file: its name must end in .yaml, .yml, .json. Name a model"),
        (["--layers_per_group", "0"], "layers_per_group=0 must be a number of layers"),
        (
            ["--model_name_or_path", "./nowhere", "--dataset", "rows.csv"],
            "model_name_or_path='./nowhere' can't be opened",
        ),
    ],
)
def test_bad_arguments_are_one_line_and_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    error = complaint(capsys, ["train", *arguments])
    assert error.startswith(f"slivertune train: error: {message}") and error.count("\n") == 1


def test_bad_data_and_settings_that_do_not_fit_the_model_are_code_2(runs: Runs) -> None:
    for more, message in (
        (["--text_column", "prose"], "prose"),
        (["--layers_per_group", "99"], "99"),
        (["--sample_prompt", ""], "sample_prompt has 0 tokens"),
        (["--max_length", "100000"], "100000"),
        (["--dataset", str(runs["absent.csv"])], "absent.csv"),
    ):
        error = runs.complaint(*more)
        assert message in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_failure_is_code_1_and_has_a_traceback_on_request_alone(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.Trainer.train", Mock(side_effect=RuntimeError("out of\nmemory")))
    assert runs.complaint(code=1) == "slivertune train: error: out of memory\n"
    assert "Traceback" in complaint(capsys, ["--debug", *runs.arguments("again")], code=1)


def test_data_are_looked_for_before_the_base_model_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slivertune.training.assemble.prepare_base_model", Mock(side_effect=AssertionError("made")))
    assert "'rows.csv' is not there" in complaint(capsys, ["train", "--dataset", "rows.csv"])


# A shell's background jobs ignore Ctrl-C and their children inherit that; a run in the foreground never does.
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("slivertune", run_name="__main__")
"""


@pytest.mark.slow
def test_ctrl_c_names_a_whole_checkpoint_and_the_command_that_continues_it(runs: Runs) -> None:
    output = runs["out put"]
    arguments = runs.arguments("out put", "--max_steps", "100000", "--save_steps", "3", *UNMEASURED)
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 90
    while newest_whole(output, read_files=False)[0] is None:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    time.sleep(0.5)  # into the midst of some later save, as likely as not
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=180)
    assert process.returncode == 130 and "Traceback" not in error
    checkpoint, _ = newest_whole(output)
    assert checkpoint is not None and f"the last whole checkpoint is {checkpoint}" in error
    command = error.strip().splitlines()[-1].partition("continue with: ")[2]
    assert command.endswith(f"--output_dir '{output}' --resume_from_checkpoint true")
    assert command.count("--output_dir") == 1
    step = int(checkpoint.name.partition("-")[2])
    assert main([*shlex.split(command)[1:], "--max_steps", str(step + 2)]) == 0
    assert results_of(output)["num_steps"] == step + 2


@pytest.mark.parametrize("launcher", [None, "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"])
@pytest.mark.parametrize(
    "folder", [("--output_dir", "{out}"), ("--output_dir={out}",), ("--output-dir", "{out}"), ("--output-dir={out}",)]
)
@pytest.mark.parametrize("resume", [(), ("--resume_from_checkpoint=true",), ("--resume-from-checkpoint", "true")])
@pytest.mark.parametrize("file", [(), ("my run.yaml",), ("my run.yaml", "--unset", "output_dir")])
def test_the_command_to_continue_names_folder_and_checkpoint_once_however_they_were_spelled(
    file: tuple[str, ...],
    resume: tuple[str, ...],
    folder: tuple[str, ...],
    launcher: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    if launcher is not None:
        monkeypatch.setenv(launcher, "no")
    output = tmp_path / "my out"
    monkeypatch.setattr("slivertune.training.run.newest_whole", lambda *args, **kwargs: (output / "checkpoint-3", []))
    words = (*file, "--seed", "3", *(word.format(out=output) for word in folder), *resume)
    words += ("--sample_prompt", "a 'b' $c")
    command = ("slivertune", "train", *words)
    arguments: Any = SimpleNamespace(command=command, training=SimpleNamespace(output_dir=str(output)))
    line, words = describe_interruption(arguments)
    start = line.partition("continue with:")[2]
    program = words[: words.index("train") + 1]
    assert words[len(program) :] == [
        *file[:1],
        *("--seed", "3", "--sample_prompt", "a 'b' $c"),
        *("--output_dir", str(output), "--resume_from_checkpoint", "true"),
    ]
    assert program == (["slivertune", "train"] if launcher is None else ["--module", "slivertune", "train"])
    assert start == "" if launcher is None else start.endswith("its options, and")


def test_ctrl_c_before_the_first_checkpoint_says_so(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.Trainer.train", Mock(side_effect=KeyboardInterrupt))
    before = signal.getsignal(signal.SIGINT)
    error = runs.complaint(code=130)
    assert signal.getsignal(signal.SIGINT) is before, "a notebook is interrupted as before"
    assert "interrupted before the first checkpoint; start again with: slivertune train" in error


@pytest.fixture
def to_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base and two folders of deltas, in the working directory."""
    model = tiny_llama(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    for seed in (0, 10):
        write_deltas(tmp_path / f"deltas{seed}", model, seed=seed, base_model_name="base")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_merge_and_unmerge_write_checkpoints_and_say_what_they_did(
    to_merge: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(torch.bfloat16)
    deltas = [deltas_of(model, seed=seed)[UP] for seed in (0, 10)]
    shared = len(set(deltas[0].indices.tolist()) & set(deltas[1].indices.tolist()))
    assert main(["merge", "deltas0", "deltas10", "--model_name_or_path", "base", "--output_dir", "merged"]) == 0
    merged = AutoModelForCausalLM.from_pretrained("merged", dtype="auto")
    assert torch.equal(merged.get_parameter(UP), naive_sum(model.get_parameter(UP), *deltas))
    captured = capfd.readouterr()
    report = json.loads(Path("merged/sft_undo/merged.json").read_text(encoding="utf-8"))
    touched = sum(tensor["num_touched"] for tensor in report["tensors"].values())
    both = sum(tensor["num_shared"] for tensor in report["tensors"].values())
    assert report["tensors"][UP]["num_shared"] == shared
    assert captured.out.startswith(f"merged: {touched} weights of 3 tensors changed\noverlap: {both} weights (")
    said = f"({both / touched:.2%}) are changed by two or more of the 2 deltas, most of them in model.layers"
    assert said in captured.out
    assert "not copied" not in captured.out
    assert main(["unmerge", "merged", "--output_dir", "again"]) == 0
    assert capfd.readouterr().out == "again: the base's weights, to the bit\n"
    again = AutoModelForCausalLM.from_pretrained("again", dtype="auto")
    assert same_bits(bits_of(again), bits_of(AutoModelForCausalLM.from_pretrained("base", dtype="auto")))


def test_merge_takes_the_base_that_the_deltas_name_from_a_folder_or_the_hubs_cache(
    to_merge: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (to_merge / "base" / "pytorch_model.bin").touch()
    assert main(["merge", "deltas0", "--output_dir", "merged"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "merged: 120 weights of 3 tensors changed",
        "not copied, since they may hold the base's weights: pytorch_model.bin",
    ]
    cache = to_merge / "cache" / "models--owner--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    (cache / "snapshots").mkdir()
    (to_merge / "base").rename(cache / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(to_merge / "cache"))
    assert main(["merge", "deltas0", "--model_name_or_path", "owner/tiny", "--output_dir", "from_hub"]) == 0
    assert Path("from_hub/model.safetensors").read_bytes() == Path("merged/model.safetensors").read_bytes()


def test_what_merge_refuses_is_one_line_and_code_2(to_merge: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_deltas(to_merge / "nameless", tiny_llama(torch.bfloat16))
    write_deltas(to_merge / "other", tiny_llama(torch.bfloat16, seed=1), base_model_name="base")
    damage(write_deltas(to_merge / "newer", tiny_llama(), base_model_name="base"), version="3")
    write_deltas(to_merge / "run" / "delta", tiny_llama(), base_model_name="base")
    before = sorted(to_merge.rglob("*"))
    for arguments, message in (
        (["merge", "nameless"], "the deltas name ['None'] as their base. Name the base with --model_name_or_path"),
        (["merge", "nameless", "deltas0"], "the deltas name ['None', 'base'] as their base. Name the base with"),
        (
            ["merge", "deltas0", "--model_name_or_path", "owner/absent"],
            "'owner/absent' is neither a folder nor",
        ),
        (["merge", "deltas0", "--model_name_or_path", "./absent"], "'./absent' is neither a folder nor a model"),
        (["merge", "absent"], "absent is not a folder. Name one with SFT's deltas or a LoRA adapter"),
        (["merge", "base"], "base/sft_delta.safetensors is not there. Name the folder that save_pretrained"),
        (["merge", "run"], "run holds neither SFT's deltas nor a LoRA adapter. Did you mean run/delta?"),
        (["merge", "other"], f"other: '{UP}' was trained on another base"),
        (["merge", "newer"], "newer/sft_delta.safetensors has version '3', and this library reads 2. Use the version"),
        (["unmerge", "base"], "base_values.safetensors is not there, so base can't be unmerged"),
        (["unmerge", "absent"], "absent is no folder"),
    ):
        error = complaint(capfd, [*arguments, "--output_dir", "out"])
        assert error.startswith(f"slivertune {arguments[0]}: error: ") and message in error, error
        assert error.count("\n") == 1
    error = complaint(capfd, ["merge", "deltas0", "--output_dir", "base"])
    assert "base exists already. Name a new folder" in error
    assert sorted(to_merge.rglob("*")) == before


def test_a_merge_that_breaks_is_code_1_and_leaves_nothing(
    to_merge: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slivertune.deltas.merge._write_undo", Mock(side_effect=OSError("No space left on device")))
    before, command = sorted(to_merge.rglob("*")), ["merge", "deltas0", "--output_dir", "out"]
    assert complaint(capfd, command, code=1) == "slivertune merge: error: No space left on device\n"
    assert "Traceback" in complaint(capfd, ["--debug", *command], code=1)
    assert sorted(to_merge.rglob("*")) == before


@pytest.mark.parametrize("command", ["merge", "unmerge"])
def test_ctrl_c_while_merging_leaves_nothing_half_written(
    command: str, to_merge: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["merge", "deltas0", "--output_dir", "merged"]) == 0
    before = sorted(to_merge.rglob("*"))
    copy = merging._copy

    def copy_and_interrupt(*args: Any) -> None:
        copy(*args)
        assert sorted(to_merge.rglob("*")) != before
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(merging, "_copy", copy_and_interrupt)
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main([command, "deltas0" if command == "merge" else "merged", "--output_dir", "out"]) == 130
    finally:
        signal.signal(signal.SIGINT, old)
    assert capfd.readouterr().err == f"\nslivertune {command}: interrupted; out was not written\n"
    assert sorted(to_merge.rglob("*")) == before
