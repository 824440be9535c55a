from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slivertune import __version__
from slivertune.cli import main
from slivertune.training.checkpoints import newest_whole
from tests.training.tiny_runs import make_tiny_base, train_arguments, write_texts


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_base(tmp_path_factory.mktemp("base") / "tiny")


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"slivertune {__version__}\n"
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(part in out for part in ("train", "path", "--version", "--debug"))
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    assert "--layers_per_group" in capsys.readouterr().out


def test_the_light_verbs_import_nothing_heavy() -> None:
    code = (
        "import sys; from slivertune.cli import main; main(['path', 'single_gpu_24g']);"
        "sys.exit(bool({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_path_prints_where_a_preset_lies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["path", "single_gpu_24g"]) == 0
    out = capsys.readouterr().out
    assert Path(out.strip()).is_file()
    assert out.endswith("single_gpu_24g.yaml\n")


def test_an_unknown_preset_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["path", "nowhere"]) == 2
    assert re.fullmatch(r"slivertune path: error: no preset is called 'nowhere'; .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [[], ["dance"], ["path"]])
def test_no_verb_or_an_unknown_one_is_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "magic"], "argument --method: invalid choice: 'magic'"),
        (["--nothing"], "unrecognized arguments: --nothing"),
        (["--layers_per_group", "0"], "layers_per_group=0 must be at least 1"),
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
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"slivertune train: error: {message}")
    assert error.count("\n") == 1


def test_bad_data_and_settings_that_do_not_fit_the_model_are_code_2(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_texts(tmp_path)
    for more, message in (
        (["--text_column", "prose"], "prose"),
        (["--layers_per_group", "99"], "99"),
        (["--sample_prompt", ""], "sample_prompt has 0 tokens"),
        (["--max_length", "100000"], "100000"),
        (["--dataset", str(tmp_path / "absent.csv")], "absent.csv"),
    ):
        assert main(train_arguments(tiny_base, data, tmp_path / "out", *more)) == 2, more
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("\n") == 1


def test_a_failure_is_code_1_and_has_a_traceback_on_request_alone(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(Trainer, "train", fail)
    data = write_texts(tmp_path)
    assert main(train_arguments(tiny_base, data, tmp_path / "out")) == 1
    assert capsys.readouterr().err == "slivertune train: error: out of memory\n"
    assert main(["--debug", *train_arguments(tiny_base, data, tmp_path / "out2")]) == 1
    assert "Traceback" in capsys.readouterr().err


# A shell's background jobs ignore Ctrl-C and their children inherit that; a run in the foreground never does.
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("slivertune", run_name="__main__")
"""


def test_ctrl_c_names_a_whole_checkpoint_and_the_command_that_continues_it(tiny_base: Path, tmp_path: Path) -> None:
    output = tmp_path / "out put"
    arguments = train_arguments(tiny_base, write_texts(tmp_path), output, "--max_steps", "100000", "--save_steps", "3")
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 90
    while newest_whole(output, read_files=False)[0] is None:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    time.sleep(0.5)  # into the midst of some later save, as likely as not
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in error
    checkpoint, _ = newest_whole(output)
    assert checkpoint is not None
    assert f"the last whole checkpoint is {checkpoint}" in error
    command = error.strip().splitlines()[-1].partition("continue with: ")[2]
    assert f"--output_dir '{output}' --resume_from_checkpoint true" in command
    step = int(checkpoint.name.partition("-")[2])
    assert main([*shlex.split(command)[1:], "--max_steps", str(step + 2)]) == 0
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    assert results["num_steps"] == step + 2


def test_ctrl_c_before_the_first_checkpoint_says_so(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "train", interrupt)
    assert main(train_arguments(tiny_base, write_texts(tmp_path), tmp_path / "out")) == 130
    assert "interrupted before the first checkpoint; start again with: slivertune train" in capsys.readouterr().err
