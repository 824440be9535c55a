import importlib.util
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING

from slivertune.cli import main
from slivertune.core import masking
from slivertune.planning import command, limits
from slivertune.planning.configs import find_model
from slivertune.planning.make import make_plan
from slivertune.planning.plan import CUBLAS_WORKSPACE_BYTES, CUDA_CONTEXT_BYTES, Plan
from slivertune.planning.request import PlanRequest
from tests.helpers.ranks import quick
from tests.planning.made import moment, planner_by, simple_plan, write_config

pytestmark = pytest.mark.usefixtures("plans_made_once")

SMALL = ("--batch_size", "2", "--seq_length", "64")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of a tiny Llama."""
    return write_config(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def plan_json(capfd: pytest.CaptureFixture[str], folder: Path, *more: str) -> dict[str, Any]:
    """What `slivertune plan --json` prints; it must end well."""
    assert main(["plan", "--model", str(folder), *SMALL, "--json", *more]) == 0
    values: dict[str, Any] = json.loads(capfd.readouterr().out)
    return values


@pytest.mark.slow
def test_with_json_standard_output_is_one_object_and_all_else_goes_to_standard_error(tiny: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slivertune", "plan", "--model", str(tiny), "--json", "--fit", "1GiB"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert isinstance(json.loads(done.stdout), dict)
    # torchao, where it is installed, writes of kernels that it lacks as soon as PEFT imports it.
    assert re.search(r"^plan 1: .*with the allowance", done.stderr, re.MULTILINE)


def test_after_ctrl_c_the_values_that_are_ready_are_printed(
    tiny: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(request: PlanRequest, config: Any) -> Plan:
        if request.batch_size == 3:
            raise KeyboardInterrupt
        return make_plan(request, config)

    monkeypatch.setattr(command, "Planner", planner_by(interrupted))
    words = ["plan", "--model", str(tiny), "--seq_length", "64", "--sweep", "batch_size=1,2,3,4", "--json"]
    assert main(words) == 130
    captured = capfd.readouterr()
    values = json.loads(captured.out)
    assert [point["batch_size"] for point in values["sweep"]] == [1, 2] and values["num_missing"] == 2
    assert "2 of 4: batch_size=2: " in captured.err and captured.err.endswith("slivertune plan: interrupted\n")


def test_what_libraries_print_or_log_while_a_plan_is_made_does_not_reach_standard_output(
    tiny: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def noisy(*args: Any) -> Any:
        print("hello from a library")
        speaks.append(logging.getLogger("transformers.some.model").isEnabledFor(logging.WARNING))
        return make_plan(*args)

    speaks: list[bool] = []

    monkeypatch.setattr(command, "Planner", planner_by(noisy))
    assert main(["plan", "--model", str(tiny), "--json"]) == 0
    captured = capfd.readouterr()
    assert isinstance(json.loads(captured.out), dict)
    assert "hello from a library" in captured.err
    assert speaks == [False], "transformers warns of what a model can't be used for, which no one asked"
    assert logging.getLogger("transformers.some.model").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["lines", "json"])
def test_a_plan_shows_no_secret(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "key-in-a-path"
    monkeypatch.setattr(masking, "_known", set())
    monkeypatch.setenv("SOME_API_KEY", secret)
    assert main(["plan", "--model", str(write_config(tmp_path / secret, num_hidden_layers=1)), *SMALL, *more]) == 0
    captured = capfd.readouterr()
    assert masking.MASK in captured.out and secret not in captured.out + captured.err


GEMMA: dict[str, Any] = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
}
GEMMA_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 64,
}
WITH_EMBEDDINGS_PER_LAYER: dict[str, dict[str, Any]] = {
    "gemma3n_text": {**GEMMA, "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 4, "altup_num_inputs": 2},
    "gemma4_text": {**GEMMA, "global_head_dim": 16},
    "gemma4": {"text_config": {**GEMMA, "global_head_dim": 16}, "vision_config": GEMMA_VISION},
}


# Text reaches no image tower, and no dummy batch is made for one that names no size of images.
@pytest.mark.filterwarnings("ignore:no dummy batch reached", "ignore:no gradient reached group")
@pytest.mark.parametrize("kind", quick(WITH_EMBEDDINGS_PER_LAYER, ["gemma3n_text"]))
def test_a_model_with_embeddings_per_layer_is_planned(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    figures: Any = CONFIG_MAPPING[kind](**WITH_EMBEDDINGS_PER_LAYER[kind])
    (tmp_path / "config.json").write_text(figures.to_json_string(), encoding="utf-8")
    assert plan_json(capfd, tmp_path)["peak_bytes"] > 0


@pytest.mark.slow
def test_the_object_is_the_plan_that_the_library_makes(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    values = plan_json(capfd, tiny, "--precision", "mixed_hi", "--stream_bytes", "32KiB")
    request = PlanRequest(precision="mixed_hi", batch_size=2, seq_length=64, stream_bytes=2**15)
    expected = json.loads(json.dumps(make_plan(request, find_model(str(tiny)).config).to_json()))
    assert {name: values[name] for name in expected} == expected
    allowance = values["allowance"]
    assert allowance["total_bytes"] == (CUDA_CONTEXT_BYTES + CUBLAS_WORKSPACE_BYTES) + allowance["fragmentation_bytes"]
    assert values["need_bytes"] == values["peak_bytes"] + allowance["total_bytes"]
    assert values["model_source"] == str(tiny / "config.json")
    assert values["command"].startswith(f"slivertune train --model_name_or_path {tiny} --dataset YOUR_DATA.jsonl")


def test_people_get_a_table_and_the_next_command(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(tiny), *SMALL, "--precision", "mixed_hi"]) == 0
    captured = capfd.readouterr()
    groups = "3 groups, 20 updates per turn"
    assert captured.out.startswith("not given, so as slivertune train has it: no gradient_checkpointing\n")
    for part in ("hift on ", "weights", "GPU memory needed", groups, "to run it: slivertune train"):
        assert part in captured.out
    assert captured.err == ""


def test_a_task_that_is_not_named_is_what_the_model_was_made_for(
    tmp_path: Path, tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        plan_json(
            capfd,
            write_config(
                tmp_path / "encoder", model_type="roberta", architectures=["RobertaForMaskedLM"], pad_token_id=1
            ),
        )["request"]["task"]
        == "classification"
    )
    assert plan_json(capfd, tiny)["request"]["task"] == "causal_lm"
    assert plan_json(capfd, tiny, "--task", "classification")["request"]["task"] == "classification"
    assert (
        main(
            [
                "plan",
                "--model",
                str(write_config(tmp_path / "whisper", model_type="clip_text_model")),
                "--task",
                "causal_lm",
            ]
        )
        == 2
    )


@pytest.mark.slow
def test_a_fit_is_found_for_a_real_model_and_its_command_is_what_was_planned(
    tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wide = plan_json(capfd, tiny, "--precision", "mixed_hi", "--batch_size", "64")
    narrow = plan_json(
        capfd, tiny, "--precision", "mixed_hi", "--batch_size", "32", "--gradient_accumulation_steps", "2"
    )
    assert narrow["need_bytes"] < wide["need_bytes"]
    found = plan_json(capfd, tiny, "--batch_size", "64", "--fit", str(narrow["need_bytes"]))
    assert found["request"] == narrow["request"]
    assert {name: found[name] for name in ("peak", "need_bytes", "command")} == {
        name: narrow[name] for name in ("peak", "need_bytes", "command")
    }
    (step,) = found["fit"]["steps"]
    assert step["changes"] == {
        "batch_size": {"from": 64, "to": 32},
        "gradient_accumulation_steps": {"from": 1, "to": 2},
    }
    assert found["fit"]["need_bytes_as_asked"] == wide["need_bytes"]


def test_on_the_machine_that_trains_its_free_memory_is_a_limit(
    tiny: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_up(request: PlanRequest, config: Any) -> Plan:
        waiting = {"host_bytes": 2000} if request.state == "host" else {"disk_bytes": 2000}
        return simple_plan(request, moment(parameters=1), **waiting)

    monkeypatch.setattr(command, "Planner", planner_by(make_up))
    monkeypatch.setattr(command, "trains_here", lambda gpu: gpu is None)
    monkeypatch.setattr(limits, "available_host_bytes", lambda: 1000)
    fit = plan_json(capfd, tiny, "--fit", "8GiB")["fit"]
    assert (fit["host_limit_bytes"], fit["assumed"]) == (1000, ["disk_limit_bytes", "host_limit_bytes"])
    assert [step["changes"] for step in fit["steps"]] == [{"state": {"from": "host", "to": "disk"}}]
    assert fit["fits_host"] and fit["fits_disk"] and fit["host_bytes_as_asked"] == 2000


@pytest.mark.slow
def test_an_impossible_fit_is_code_2_and_the_size_that_it_names_fits(
    tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--model", str(tiny), *SMALL, "--weights", "device"]
    assert main([*words, "--fit", "500MiB", "--json"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    error = captured.err.splitlines()[-1]
    assert error.startswith("slivertune plan: error: no setting that may change makes this fit 500.0 MiB. The smallest")
    assert error.endswith(". Not changed, as the command sets it: --weights")
    smallest = error.partition("(")[2].partition(" bytes")[0].replace(",", "")
    assert main([*words, "--fit", smallest]) == 0


@pytest.mark.slow
def test_a_sweep_has_a_plan_a_value_a_table_and_a_picture(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--model", str(tiny), "--sweep", "seq_length=32,128", "--fit", "1GiB"]
    assert main([*words, "--json"]) == 0
    values = json.loads(capfd.readouterr().out)
    assert [point["seq_length"] for point in values["sweep"]] == [32, 128]
    for point in values["sweep"]:
        assert (
            point["peak_bytes"]
            == make_plan(PlanRequest(seq_length=point["seq_length"]), find_model(str(tiny)).config).peak_bytes
        )
        assert point["fits"] == (point["need_bytes"] <= 2**30)
    assert main([*words, "--plot", str(tmp_path / "lengths.png")]) == 0
    captured = capfd.readouterr()
    assert "seq_length" in captured.out and f"drew {tmp_path / 'lengths.png'}" in captured.out
    assert (tmp_path / "lengths.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "owner/absent"], "there is no folder 'owner/absent', and the hub can't be reached"),
        (["--model", "{tiny}", "--layout", "zero3"], "layout='zero3' needs at least 2 GPUs, and num_gpus=1"),
        (["--model", "{tiny}", "--batch_size", "0"], "--batch_size 0 must be at least 1"),
        (
            ["--model", "{tiny}", "--sweep", "token_ratio=0.5,2"],
            "argument --sweep: 'token_ratio=0.5,2' has a value that token_ratio can't take: token_ratio=2.0 must be",
        ),
        (
            ["--model", "{tiny}", "--method", "dense", "--fit", "1GiB", "--load_in_4bit"],
            "--load_in_4bit does not go with --method dense",
        ),
        (["--model", "{tiny}", "--method", "magic"], "argument --method: invalid choice: 'magic'"),
        ([], "the following arguments are required: --model"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    words: list[str], message: str, tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *(word.format(tiny=tiny) for word in words), "--json"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"slivertune plan: error: {message}")
    assert captured.err.count("\n") == 1


def test_a_configuration_that_is_no_transformer_is_code_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, figures, part in (
        ("resnet", {"model_type": "resnet"}, "which has no head for any of causal_lm"),
        ("unet", {"_class_name": "UNet2DConditionModel"}, "is not a configuration of a transformer"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(figures), encoding="utf-8")
        assert main(["plan", "--model", str(tmp_path / name), *SMALL]) == 2, name
        error = capfd.readouterr().err
        assert error.startswith("slivertune plan: error: ") and part in error
        assert error.count("\n") == 1, error


def test_a_failure_is_code_1_with_a_traceback_on_request_and_ctrl_c_is_130(
    tiny: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: BaseException = RuntimeError("it\nbroke")

    def fail(*args: Any) -> None:
        raise raised

    monkeypatch.setattr(command, "Planner", planner_by(fail))
    assert main(["plan", "--model", str(tiny)]) == 1
    assert capfd.readouterr().err == "slivertune plan: error: it broke\n"
    assert main(["--debug", "plan", "--model", str(tiny)]) == 1
    assert "Traceback" in capfd.readouterr().err
    raised = KeyboardInterrupt()
    assert main(["plan", "--model", str(tiny)]) == 130
    assert capfd.readouterr().err == "\nslivertune plan: interrupted\n"


def test_a_missing_matplotlib_is_told_of_before_anything_is_planned(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ImportError("--plot needs matplotlib")

    monkeypatch.setattr(command, "require_matplotlib", refuse)
    monkeypatch.setattr(command, "Planner", None)
    assert main(["plan", "--model", str(tiny), "--plot", str(tmp_path / "x.png")]) == 1
    assert capfd.readouterr().err == "slivertune plan: error: ImportError: --plot needs matplotlib\n"


@pytest.mark.slow
def test_matplotlib_is_imported_by_a_plot_alone(tiny: Path) -> None:
    code = (
        "import sys; from slivertune.cli import main; main(['plan', '--model', sys.argv[1], '--seq_length', '8']);"
        "sys.exit('matplotlib' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny)], check=True, capture_output=True, timeout=300)


def test_help_is_printed_and_the_list_of_commands_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    for words, part in ((["plan", "--help"], "--fit [SIZE]"), (["--help"], "settings that fit a GPU")):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 0
        assert part in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_a_model_with_a_tower_of_timm_names_the_library_that_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    figures = CONFIG_MAPPING["gemma3n"](text_config=WITH_EMBEDDINGS_PER_LAYER["gemma3n_text"])
    (tmp_path / "config.json").write_text(figures.to_json_string(), encoding="utf-8")
    assert main(["plan", "--model", str(tmp_path), *SMALL]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("slivertune plan: error: ImportError: ")
    assert "requires the timm library" in line and "`pip install timm`" in line


PAD_OUTSIDE = {"model_type": "llama", "pad_token_id": 512, "vocab_size": 512}
NO_START = {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        (PAD_OUTSIDE, "pad_token_id=512 must be at least 0 and less than vocab_size=512. Correct one of the two in"),
        ({**PAD_OUTSIDE, "pad_token_id": -513}, "pad_token_id=-513 must be at least 0 and less than vocab_size=512."),
        (
            {**NO_START, "decoder_start_token_id": None},
            "decoder_start_token_id=None must be the id of a token, the first of a 't5' decoder. Set it in",
        ),
        (NO_START, "decoder_start_token_id=None must be the id of a token, the first of a 't5' decoder. Set it in"),
    ],
    ids=["pad", "negative pad", "no start", "absent start"],
)
def test_a_special_token_that_the_model_can_not_use_is_refused(
    figures: dict[str, Any], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(figures), encoding="utf-8")
    assert main(["plan", "--model", str(tmp_path), *SMALL]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"slivertune plan: error: {message}") and error.count("\n") == 1


def test_a_padding_token_that_the_model_does_not_read_is_planned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path / "gpt2", model_type="gpt2", pad_token_id=60000)
    assert plan_json(capfd, path)["peak_bytes"] > 0


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="older decoders of this family read whether they drop a layer, which a plan can't know",
)
def test_a_decoder_that_needs_no_start_token_is_planned(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    figures = {"model_type": "mbart", "vocab_size": 64, "d_model": 32, "decoder_layers": 1, "decoder_ffn_dim": 48}
    heads = {"decoder_attention_heads": 2, "encoder_attention_heads": 2, "encoder_layers": 1, "encoder_ffn_dim": 48}
    (tmp_path / "config.json").write_text(json.dumps({**figures, **heads}), encoding="utf-8")
    assert plan_json(capfd, tmp_path, "--task", "causal_lm")["peak_bytes"] > 0
