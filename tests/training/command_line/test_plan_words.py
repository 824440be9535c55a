"""Run files and options of `slivertune train` in `slivertune plan`."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import RobertaConfig

from slivertune.cli import main
from slivertune.core.presets import preset_path, run_file_names
from slivertune.training.command_line.plan_words import parse_plan_arguments
from tests.training.tiny import llama_config
from tests.training.tiny_runs import Runs

RUN = """\
model_name_or_path: llama-2-7b
method: hift
layers_per_group: 0.5
stream_bytes: 64MiB
prefetch_bytes: auto
bf16: true
gradient_checkpointing: on
per_device_train_batch_size: 4
max_length: 2048
learning_rate: 4e-5
dataset: [a.jsonl, b.jsonl]
layers: [model.embed_tokens, model.norm+lm_head]
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN, encoding="utf-8")


def tiny_config() -> Any:
    """A model of 48 positions and a single block, since each layer is planned for itself."""
    config = llama_config(positions=48)
    config.num_hidden_layers = 1
    return config


def planned(*words: str) -> tuple[dict[str, Any], list[str]]:
    arguments = parse_plan_arguments(words)
    return {"model": arguments.model, **arguments.given}, list(arguments.unread)


def test_a_run_file_is_planned_as_it_stands() -> None:
    given, unread = planned("run.yaml", "--gpu", "4090")
    assert given == {
        "model": "llama-2-7b",
        "method": "hift",
        "layers_per_group": 0.5,
        "stream_bytes": 2**26,
        "precision": "mixed_hi",
        "gradient_checkpointing": True,
        "batch_size": 4,
        "seq_length": 2048,
        "layers": ("model.embed_tokens", "model.norm+lm_head"),
    }
    assert unread == ["prefetch_bytes", "learning_rate", "dataset"]


@pytest.mark.filterwarnings("ignore")  # SFT's advice on a model that is not pretrained
def test_what_a_run_file_leaves_out_is_as_train_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config()
    for dtype, words, precision in (
        ("float32", (), "fp32"),
        ("bfloat16", (), "mixed_hi"),
        ("bfloat16", ("--master", "none"), "bf16"),
        ("bfloat16", ("--method", "sft"), "bf16"),
        ("bfloat16", ("--method", "dense"), "fp32"),
        ("bfloat16", ("--weights_dtype", "fp32"), "fp32"),
    ):
        config.dtype = dtype
        config.save_pretrained("model")
        Path("short.yaml").write_text("model_name_or_path: model\n", encoding="utf-8")
        assert main(["plan", "short.yaml", *words, "--json"]) == 0
        request = json.loads(capsys.readouterr().out)["request"]
        assert [request[name] for name in ("batch_size", "seq_length", "precision")] == [8, 48, precision], words
    config.dtype = None
    config.save_pretrained("model")
    assert main(["plan", "short.yaml", "--gradient_checkpointing"]) == 0
    expected = "batch_size 8, seq_length 48, precision fp32 (the model's config names no dtype)"
    assert capsys.readouterr().out.startswith(f"not given, so as slivertune train has it: {expected}\n")


PRECISIONS = {"hift": "mixed_hi", "sft": "bf16", "dense": "fp32"}


@pytest.mark.filterwarnings("ignore")  # SFT's advice on a model that is not pretrained
@pytest.mark.parametrize("methods", [("hift", "dense"), pytest.param(tuple(PRECISIONS), marks=pytest.mark.slow)])
def test_each_method_of_a_sweep_has_the_precision_that_train_gives_it(
    methods: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    config.dtype = "bfloat16"
    config.save_pretrained("model")
    Path("short.yaml").write_text("model_name_or_path: model\n", encoding="utf-8")
    assert main(["plan", "short.yaml", "--sweep", f"method={','.join(methods)}", "--json"]) == 0
    swept = json.loads(capsys.readouterr().out)["sweep"]
    assert [plan["request"]["precision"] for plan in swept] == [PRECISIONS[method] for method in methods]


AS_TRAIN = "so as slivertune train has it"


@pytest.mark.parametrize(
    ("dtype", "words", "said"),
    [
        ("bfloat16", "--model model", f"{AS_TRAIN}: batch_size 8, seq_length 48, precision mixed_hi, no"),
        ("bfloat16", "--model model --fit 24GiB", "so: batch_size 8, seq_length 48, precision mixed_hi, no"),
        ("float32", "--model model --fit 24GiB", "so: batch_size 8, seq_length 48, precision mixed_hi, no"),
        ("float32", "short.yaml --fit 24GiB", "so: batch_size 8, seq_length 48, precision fp32, no"),
        (
            "bfloat16",
            "--model model --sweep seq_length=8,16 --fit 24GiB",
            f"{AS_TRAIN}: batch_size 8, precision mixed_hi, no",
        ),
        pytest.param(
            "bfloat16",
            "--model model --max batch_size --fit 577MiB --bf16",
            f"{AS_TRAIN}: seq_length 48, no",
            marks=pytest.mark.slow,
        ),
        ("float16", "--model model --sweep method=hift,dense --batch_size 2", f"{AS_TRAIN}: seq_length 48, no"),
    ],
)
def test_a_first_line_names_what_was_not_given(
    dtype: str, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    config.dtype = dtype
    config.save_pretrained("model")
    Path("short.yaml").write_text("model_name_or_path: model\n", encoding="utf-8")
    assert main(["plan", *words.split()]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"not given, {said} gradient_checkpointing"


def test_positions_before_the_first_token_are_none_of_its_length(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = RobertaConfig(**sizes, num_attention_heads=2, max_position_embeddings=40, pad_token_id=1)
    config.save_pretrained("model")
    assert main(["plan", "--model", "model", "--task", "classification", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["seq_length"] == 38


def test_typed_options_win_under_any_of_their_names() -> None:
    words = ("--batch-size", "2", "--max_length=64", "--learning-rate", "1e-3", "--seed=3", "--layers_per_group", "1")
    given, unread = planned("run.yaml", *words)
    assert (given["batch_size"], given["seq_length"], given["layers_per_group"]) == (2, 64, 1)
    assert unread == ["prefetch_bytes", "learning_rate", "dataset", "seed"]


def test_an_option_of_a_run_file_is_taken_back_or_replaced_by_another_of_the_same_meaning() -> None:
    given, unread = planned("run.yaml", "--unset", "bf16", "learning_rate", "--seed", "3")
    assert "precision" not in given and unread == ["prefetch_bytes", "dataset", "seed"]
    assert planned("run.yaml", "--precision", "bf16")[0]["precision"] == "bf16"
    assert planned("run.yaml", "--weights_dtype", "fp32")[0]["precision"] == "mixed"


def test_options_of_train_alone_are_read_over_without_a_file() -> None:
    given, unread = planned("--model", "m", "--learning_rate", "-0", "--dataset", "a", "b", "--preset", "paper")
    assert (given["model"], given["layers_per_group"], given["steps_per_group"]) == ("m", 1, 1)
    assert unread == ["learning_rate", "dataset"]


@pytest.mark.parametrize("name", run_file_names())
def test_every_run_file_of_ours_is_planned(name: str) -> None:
    given, _ = planned(str(preset_path(name)), "--model", "llama-3-8b")
    assert given["model"] and given["precision"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run.yaml", "--learning_rate", "-1"), "--learning_rate -1.0 must be at least 0 and at most 100"),
        (("run.yaml", "--learnin_rate", "1"), "unrecognized arguments: --learnin_rate 1"),
        (("run.yaml", "--fp16"), "fp16 True has no plan, and changes the memory of a run"),
        (
            ("run.yaml", "--deepspeed", "z.json"),
            "deepspeed z.json distributes the run. Say how, for",
        ),
        (("nothing.yaml",), "config file nothing.yaml is not there"),
        (("kept.yaml",), "keep_activations auto fills the memory that the device has left"),
    ],
)
def test_what_can_not_be_planned_is_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("kept.yaml").write_text(f"{RUN}keep_activations: auto\n", encoding="utf-8")
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("slivertune plan: error: ") and error.count("\n") == 1 and said in error


def test_the_file_that_a_run_keeps_is_planned_to_the_runs_own_plan(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    results = runs.train("out", "--packing", "--max_length", "32", "--steps_per_group", "1")
    capsys.readouterr()
    assert main(["plan", str(runs["out"] / "slivertune_run.yaml"), "--kernels", "cpu", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["peak_bytes"] == results["planned_peak_bytes"]
    assert "not read: " in told.err and "learning_rate" in told.err
