"""Presets that `slivertune train` reads: each but the largest trains a tiny model as it stands."""

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from slivertune.cli import main
from slivertune.core.presets import preset_path, run_file_names
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.options.full_method import without_full
from slivertune.training.options.table import RENAMED
from tests.helpers.ranks import quick
from tests.training.tiny_runs import TINY_CYCLE, UNMEASURED

PLANNED_ALONE = "single_gpu_48g_70b.yaml"


@pytest.mark.parametrize(
    "name", quick([name for name in run_file_names() if name != PLANNED_ALONE], ["single_gpu_12g_8b.yaml"])
)
def test_a_run_file_trains_every_weight(
    name: str, tiny_base: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    typed = ["--model_name_or_path", str(tiny_base), "--dataset", str(texts), "--output_dir", "out", "--use_cpu"]
    typed += ["--max_length", "128"]  # the tiny model has no more positions
    # In bf16 smaller steps than these round away; each layer has one.
    typed += ["--steps_per_group", "1", "--max_steps", str(TINY_CYCLE)]
    typed += ["--learning_rate", "1e-2", "--lr_scheduler_type", "constant"]
    assert main(["train", str(preset_path(name)), *typed, *UNMEASURED]) == 0
    asked = yaml.safe_load(preset_path(name).read_text(encoding="utf-8"))
    kept = yaml.safe_load((tmp_path / "out" / "slivertune_run.yaml").read_text(encoding="utf-8"))
    assert {key: kept[key] for key in ("waiting", "weights", "state", "optim") if key in asked} == {
        key: asked[key] for key in ("waiting", "weights", "state", "optim") if key in asked
    }
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
        for folder in (tiny_base, tmp_path / "out" / "model")
    )
    assert [key for key in before if torch.equal(before[key], after[key])] == []


@pytest.mark.parametrize("name", run_file_names())
def test_a_run_file_is_read_as_it_stands(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = yaml.safe_load(preset_path(name).read_text(encoding="utf-8"))
    arguments = parse_train_arguments([str(preset_path(name)), "--use_cpu"])
    assert arguments.given == {*(RENAMED.get(key, key) for key in without_full(asked)), "use_cpu"}
    assert (arguments.method.name, arguments.precision.loading) == ("hift", "bf16")
