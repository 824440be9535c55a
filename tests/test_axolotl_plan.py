"""`axolotl slivertune-plan`: the words that axolotl's YAML stands for, and the command in axolotl's own group."""

import json
import re
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from slivertune import axolotl_plan
from slivertune.axolotl_plan import plan_words
from slivertune.training.command_line.plan_words import parse_plan_arguments
from tests.helpers.models import tiny_llama
from tests.helpers.process_state import forget_accelerate

HIFT: dict[str, Any] = {"base_model": "llama-2-7b", "slivertune": {"hift": {}}}
NO_CHUNKS = {"chunked_cross_entropy": False}


def given(config: dict[str, Any], *more: str) -> dict[str, Any]:
    """The request that `slivertune plan` reads from the words."""
    return parse_plan_arguments(plan_words(config, more)).given


@pytest.mark.parametrize(
    ("config", "more", "expected"),
    [
        ({}, (), {"method": "hift", "precision": "fp32"}),
        (
            {
                "sequence_len": 2048,
                "micro_batch_size": 4,
                "batch_size": 8,
                "bf16": "auto",
                "gradient_checkpointing": True,
            },
            (),
            {
                "seq_length": 2048,
                "batch_size": 4,
                "gradient_accumulation_steps": 2,
                "precision": "mixed_hi",
                "method": "hift",
                "gradient_checkpointing": True,
            },
        ),
        (
            {
                "bf16": True,
                "slivertune": {
                    "hift": {
                        "layers_per_group": 4,
                        "master": "none",
                        "order": "random",
                        "state": "device",
                        "layers": [["a.*"], ["b", "c"]],
                    }
                },
            },
            (),
            {
                "method": "hift",
                "precision": "bf16",
                "layers_per_group": 4,
                "master": "none",
                "state": "device",
                "layers": ("a.*", "b+c"),
            },
        ),
        (
            {
                "bf16": True,
                "slivertune": {
                    "sft": {
                        "density": 0.1,
                        "targets": ["q_proj", "v_proj"],
                        "embeddings": True,
                        "selection": "momentum",
                        "reselection_interval": 0,
                    },
                    "tokentune": {"ratio": 0.3},
                    "momentum": 0.9,
                },
            },
            (),
            {
                "method": "sft",
                "precision": "bf16",
                "density": 0.1,
                "sft_target_modules": ("q_proj", "v_proj"),
                "train_embeddings": True,
                "selection": "momentum",
                "reselection_interval": 0,
                "token_ratio": 0.3,
                "sft_momentum": 0.9,
            },
        ),
        (
            {
                "bf16": True,
                "adapter": "qlora",
                "load_in_4bit": True,
                "lora_r": 8,
                "sequence_len": 64,
                "slivertune": {"tokentune": {"num_tokens": 16}},
            },
            (),
            {
                "method": "lora",
                "precision": "bf16",
                "load_in_4bit": True,
                "lora_rank": 8,
                "seq_length": 64,
                "token_ratio": 0.25,
            },
        ),
        (
            {"optimizer": "adamw_bnb_8bit", "eager_attention": True},
            (),
            {"method": "hift", "precision": "fp32", "optimizer": "adamw8bit", "attn_implementation": "eager"},
        ),
        # Words after the file replace its values, under each of their names.
        (
            {"sequence_len": 64, "micro_batch_size": 2, "bf16": True, "optimizer": "lion_8bit"},
            (
                "--max-length",
                "32",
                "--per_device_train_batch_size=1",
                "--precision",
                "fp32",
                "--optimizer",
                "sgd",
                "--chunked_cross_entropy",
                "true",
            ),
            {
                "method": "hift",
                "seq_length": 32,
                "batch_size": 1,
                "precision": "fp32",
                "optimizer": "sgd",
                "chunked_cross_entropy": True,
            },
        ),
        (
            {"bf16": True, "slivertune": {"hift": {"layers_per_group": 4}}},
            ("--method", "dense"),
            {"method": "dense", "precision": "bf16"},
        ),
        ({"sequence_len": 64}, ("--sweep", "seq_length=8,16"), {"method": "hift", "precision": "fp32"}),
        (
            {"deepspeed": "zero2.json"},
            ("--layout", "zero2", "--num_gpus", "2"),
            {"method": "hift", "precision": "fp32", "layout": "zero2", "num_gpus": 2},
        ),
    ],
)
def test_a_config_becomes_a_request(config: dict[str, Any], more: tuple[str, ...], expected: dict[str, Any]) -> None:
    sizes = {"batch_size": 1} if "--sweep" in more else {"batch_size": 1, "seq_length": 512}
    assert given(HIFT | config, *more) == sizes | NO_CHUNKS | expected


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"slivertune": None}, "Name hift, sft or tokentune under it"),
        ({"rl": "dpo"}, "rl: dpo has no plan"),
        ({"adapter": "lora"}, "adapter: lora with hift has no plan"),
        ({"adapter": "mora", "slivertune": {"tokentune": {"ratio": 0.3}}}, "adapter: mora has no plan"),
        ({"fsdp_config": {"version": 2}}, "distributes the run. Say how after the file: --layout"),
        ({"gradient_checkpointing": "offload"}, "offload has no plan. Say after the file"),
        ({"slivertune": {"sft": {"form": "layer"}}}, "sft: form: layer has no plan"),
    ],
)
def test_a_setting_without_a_plan_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_words(HIFT | config)


def test_a_comparison_sets_what_it_compares_by_itself() -> None:
    config = HIFT | {"micro_batch_size": 4, "bf16": True, "sequence_len": 64}
    assert given(config, "--compare", "--gpu", "4090") == NO_CHUNKS | {"seq_length": 64}


def test_the_command_of_the_page_is_one_that_there_is(checkout: Path) -> None:
    page = (checkout / "docs" / "trainers.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^axolotl slivertune-plan run.yml (.+)$", page, re.MULTILINE)
    assert parse_plan_arguments(plan_words(HIFT, command.split())).gpu == "4090"


def test_a_name_that_the_module_has_not_is_no_command() -> None:
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        axolotl_plan.train  # noqa: B018


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    tiny_llama().config.save_pretrained(tmp_path / "base")
    config = {"base_model": str(tmp_path / "base"), "sequence_len": 16, "slivertune": {"hift": {"layers_per_group": 2}}}
    path = tmp_path / "run.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def test_the_command_prints_the_plan_and_the_words_that_make_it(run_file: Path) -> None:
    testing = pytest.importorskip("click.testing")
    done = testing.CliRunner().invoke(axolotl_plan.plan, [str(run_file), "--json", "--batch_size", "2"])
    assert done.exit_code == 0, done.output
    assert "same as slivertune plan --model_name_or_path " in done.stderr and "--layers_per_group 2" in done.stderr
    request = json.loads(done.stdout)["request"]
    assert (request["batch_size"], request["layers_per_group"], request["seq_length"]) == (2, 2, 16)
    run_file.write_text("slivertune: {hift: {}}\nrl: dpo", encoding="utf-8")
    refused = testing.CliRunner().invoke(axolotl_plan.plan, [str(run_file)])
    assert refused.exit_code == 2 and "rl: dpo has no plan" in refused.stderr
    run_file.write_text("- one", encoding="utf-8")
    assert "no mapping of settings" in testing.CliRunner().invoke(axolotl_plan.plan, [str(run_file)]).stderr


@pytest.mark.filterwarnings("ignore")  # what axolotl, and what it imports, ask others for that is deprecated
def test_axolotls_own_group_finds_the_command_by_its_entry_point(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = pytest.importorskip("axolotl.cli.plugins", reason="axolotl is in the environment of `make test-oldest`")
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (name, target), *_ = project["entry-points"][plugins.ENTRY_POINT_GROUP].items()
    # As an installation of this pyproject.toml has it, whichever one is here.
    about = tmp_path / "declared-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(f"[{plugins.ENTRY_POINT_GROUP}]\n{name} = {target}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert name in entry_points(group=plugins.ENTRY_POINT_GROUP).names
    group = plugins.PluginCommandGroup("axolotl")
    assert group.get_command(None, "slivertune-plan").resolve() is axolotl_plan.plan


@pytest.mark.filterwarnings("ignore")  # what axolotl, and what it imports, ask others for that is deprecated
def test_axolotl_finds_accelerates_state_after_another_test_has_had_its_own() -> None:
    distributed = pytest.importorskip("axolotl.utils.distributed", reason="axolotl is in that environment alone")
    assert not distributed.is_distributed()
    forget_accelerate()
    assert not distributed.is_distributed()
