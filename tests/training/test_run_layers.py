"""Whole runs of models without attention: their layers are found, or named."""

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    FalconMambaConfig,
    FNetConfig,
    MambaConfig,
    Trainer,
    set_seed,
)

from slivertune import HiFTConfig, attach
from slivertune.cli import main
from tests.helpers.models import differing
from tests.helpers.ranks import quick
from tests.training.tiny_runs import UNMEASURED, Runs, assert_same_bits, complaint, saved_weights, write_classes

MAMBA_WORDS = ("backbone.embeddings", "backbone.layers.*", "backbone.norm_f")
MAMBA_LAYERS = (["backbone.embeddings"], ["backbone.layers.0"], ["backbone.layers.1"], ["backbone.norm_f"])
"""Its head is tied to the embedding."""
CASES: dict[str, tuple[Callable[..., Any], tuple[str, ...], tuple[list[str], ...]]] = {
    "mamba": (MambaConfig, MAMBA_WORDS, MAMBA_LAYERS),
    "falcon_mamba": (
        partial(FalconMambaConfig, tie_word_embeddings=False),
        (*MAMBA_WORDS[:2], "backbone.norm_f+lm_head"),
        (*MAMBA_LAYERS[:3], ["backbone.norm_f", "lm_head"]),
    ),
    "fnet": (
        partial(FNetConfig, hidden_dropout_prob=0.0),
        ("fnet.embeddings", "fnet.encoder.layer.*", "fnet.pooler+classifier"),
        (["fnet.embeddings"], ["fnet.encoder.layer.0"], ["fnet.encoder.layer.1"], ["fnet.pooler", "classifier"]),
    ),
}
"""By type: its configuration, its layers as words, and as a script has them."""
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "intermediate_size": 16}
TWO_UPDATES = ("--max_steps", "2", "--max_length", "16", "--truncate", "--sample_tokens", "0")


def make_base(runs: Runs, kind: str, folder: Path) -> Path:
    """Save a tiny random model with the tokenizer of the tiny base."""
    tokenizer = AutoTokenizer.from_pretrained(runs.base)
    config = CASES[kind][0](**SIZES, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    kinds: dict[str, Any] = {"fnet": AutoModelForSequenceClassification}
    if kind == "fnet":
        # It takes no mask.
        tokenizer.model_input_names = ["input_ids"]
    set_seed(0)
    kinds.get(kind, AutoModelForCausalLM).from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def words(request: pytest.FixtureRequest, runs: Runs, tmp_path: Path) -> tuple[str, ...]:
    """The options of two updates of a kind of model."""
    base = make_base(runs, request.param, tmp_path / "base")
    task = ("--task", "classification", "--dataset", str(write_classes(tmp_path))) if request.param == "fnet" else ()
    return ("--model_name_or_path", str(base), *task, *TWO_UPDATES, *UNMEASURED)


@pytest.mark.parametrize(
    ("words", "kind"),
    quick([(kind, kind) for kind in CASES], [("falcon_mamba", "falcon_mamba")]),
    indirect=["words"],
)
def test_two_updates_of_named_layers_are_those_of_a_script(words: tuple[str, ...], kind: str, runs: Runs) -> None:
    more = (*words, "--layers", *CASES[kind][1], "--chunked_cross_entropy", "false")
    runs.train("typed", *more)
    run = runs.assembled("script", *more)
    run.close()
    set_seed(run.arguments.training.seed)
    automatic: Any = AutoModelForSequenceClassification if kind == "fnet" else AutoModelForCausalLM
    trainer = Trainer(
        model=automatic.from_pretrained(words[1], **({"num_labels": 2} if kind == "fnet" else {})),
        args=run.arguments.training,
        train_dataset=run.task.train_dataset,
        data_collator=run.task.data_collator,
        compute_loss_func=run.task.compute_loss_func,
    )
    hift = attach(trainer, HiFTConfig.paper(layers=CASES[kind][2])).optimizer
    trainer.train()
    assert [group.layers[0].name for group in hift.groups] == [
        names[0] if len(names) == 1 else f"custom.{index}" for index, names in enumerate(CASES[kind][2])
    ]
    assert hift.rotation.updates == 2
    trained = trainer.model.state_dict()
    saved = saved_weights(runs["typed"] / "model")
    assert differing(saved, {name: trained[name] for name in saved}) == []


@pytest.mark.parametrize("words", ["mamba"], indirect=True)
def test_named_layers_stay_with_the_run_and_a_file_may_name_them(
    words: tuple[str, ...], runs: Runs, tmp_path: Path
) -> None:
    more = (*words, "--save_steps", "1")
    layers = ("--layers", *MAMBA_WORDS)
    runs.train("found", *more)
    said = runs.complaint(*more, "--layers", "backbone.layers.*")
    assert "--layers leaves out 'backbone.embeddings.weight'" in said
    runs.train("whole", *more, *layers)
    assert_same_bits(runs["found"], runs["whole"])
    kept = yaml.safe_load((runs["whole"] / "slivertune_run.yaml").read_text(encoding="utf-8"))
    assert kept["layers"] == list(MAMBA_WORDS)
    checkpoint = str(runs["whole/checkpoint-1"])
    runs.train("resumed", *more, *layers, "--resume_from_checkpoint", checkpoint)
    assert_same_bits(runs["resumed"], runs["whole"])
    said = runs.complaint(*more, "--resume_from_checkpoint", checkpoint)
    assert f"was trained with layers={list(MAMBA_WORDS)}, and this run asks for layers=None" in said
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**kept, "layers": ", ".join(MAMBA_WORDS)}), encoding="utf-8")
    assert main(["train", str(path), "--output_dir", str(runs["from file"])]) == 0
    assert_same_bits(runs["from file"], runs["whole"])


@pytest.mark.parametrize("kind", quick(["mamba", "falcon_mamba"], ["falcon_mamba"]))
def test_named_layers_are_planned(kind: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", str(make_base(runs, kind, tmp_path / "base")), "--seq_length", "8"]
    assert main([*plan, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan += ["--layers", *CASES[kind][1]]
    assert main([*plan, "--json"]) == 0
    named = json.loads(capsys.readouterr().out)
    assert "backbone.layers.0" in str(named) and named["peak_bytes"] == found["peak_bytes"]
    message = complaint(capsys, [*plan, "--layout", "ddp", "--num_gpus", "2"])
    assert "Use layout='single'" in message


def test_lora_leaves_out_what_mambas_kernels_read_and_says_so(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_base(runs, "mamba", tmp_path / "base")
    runs.train("lora", "--model_name_or_path", str(base), *TWO_UPDATES, *UNMEASURED, method="lora")
    assert "conv1d, out_proj, dt_proj, x_proj have no adapter: Mamba reads their weights" in capsys.readouterr().out
    with safe_open(runs["lora/model"] / "adapter_model.safetensors", framework="pt") as saved:
        adapted = {name.split(".")[-3] for name in saved.keys()}  # noqa: SIM118
        trained = [name for name in saved.keys() if "lora_B" in name and saved.get_tensor(name).any()]  # noqa: SIM118
    assert adapted == {"in_proj"} and len(trained) == 2
    with warnings.catch_warnings():
        # PEFT 0.21 asks by the name that transformers 5.23 retires.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        model = AutoPeftModelForCausalLM.from_pretrained(runs["lora/model"])
    assert model(input_ids=torch.arange(1, 9).reshape(1, 8)).logits.isfinite().all()


def test_sft_names_its_own_way_out(runs: Runs, tmp_path: Path) -> None:
    base = make_base(runs, "mamba", tmp_path / "base")
    said = runs.complaint("--model_name_or_path", str(base), *TWO_UPDATES, *UNMEASURED, method="sft")
    assert "Name the targets with --sft_target_modules" in said and "layers" not in said.partition("ModuleList")[2]
