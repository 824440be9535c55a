"""The optimizers for LLaMA-Factory v1: `optim_config`, what is refused, and its real registry and trainer."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml  # type: ignore[import-untyped]
from safetensors.torch import load_file
from torch import nn

from slivertune import HiFTConfig, SFTConfig
from slivertune.interop import llamafactory
from slivertune.interop.llamafactory import build_hift, build_sft, register_optimizers
from tests.helpers.launching import run_python
from tests.helpers.models import LAYERS, tiny_llama
from tests.interop.by_hand import HandRotated
from tests.training.tiny import word_tokenizer

UPDATES = 8
PAGE = re.MULTILINE | re.DOTALL
HIFT: dict[str, Any] = {
    "name": "slivertune_hift",
    "lr": 1e-2,
    "layers_per_group": 2,
    "steps_per_group": 1,
    "order": "bottom2up",
}
SFT: dict[str, Any] = {
    "name": "slivertune_sft",
    "lr": 1e-2,
    "total_steps": UPDATES,
    "density": 0.1,
    "reselection_interval": 3,
    "estimation_steps": 2,
}


def test_the_section_becomes_options_and_settings() -> None:
    hift = build_hift(tiny_llama(), HIFT | {"betas": [0.8, 0.9], "order": "top2down", "weight_decay": None})
    assert hift.config == HiFTConfig.paper(layers_per_group=2, order="top2down")
    # Without a value of its own, an option has torch's default, as in LLaMA-Factory's own AdamW.
    own = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-2, betas=(0.8, 0.9)).param_groups[0]
    assert {name: hift.param_groups[0][name] for name in own if name != "params"} == {
        name: value for name, value in own.items() if name != "params"
    }
    sft = build_sft(tiny_llama(), SFT | {"eps": 1e-6})
    assert sft.config == SFTConfig(density=0.1, reselection_interval=3, estimation_steps=2)
    assert (sft.total_steps, sft.param_groups[0]["lr"], sft.param_groups[0]["eps"]) == (UPDATES, 1e-2, 1e-6)


@pytest.mark.parametrize(
    ("build", "section", "said"),
    [
        (build_hift, {"name": "slivertune_hift"}, "optim_config: lr is missing. .* write lr under optim_config"),
        (build_sft, {"lr": 1e-2}, "total_steps is missing"),
        (build_hift, {"lr": "2e-5"}, "optim_config: lr='2e-5' must be a number"),
        (build_hift, {"lr": 1e-2, "betas": 0.9}, "betas=0.9 must be two numbers"),
        (build_hift, {"lr": 1e-2, "layer_per_group": 1}, "layer_per_group is no field of HiFTConfig; did you mean"),
        (build_sft, {"lr": 1e-2, "total_step": 9}, "total_steps is missing"),
        (build_hift, {"lr": 1e-2, "weight_decays": 0}, "weight_decays is no field of HiFTConfig; .* weight_decay?"),
        (build_sft, SFT | {"form": "layer"}, "form='layer', so that deltas .* use form='optimizer'"),
    ],
)
def test_a_section_that_can_not_be_followed_is_refused(build: Any, section: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(tiny_llama(), section)


def test_4_bit_weights_whose_deltas_would_not_be_saved_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamafactory, "find_targets", lambda *_: [SimpleNamespace(name="q_proj", is_4bit=True)])
    with pytest.raises(ValueError, match=r"q_proj is a 4-bit weight, .* without quant_config"):
        build_sft(tiny_llama(), SFT)


@pytest.mark.parametrize("section", [HIFT, SFT], ids=["hift", "sft"])
@pytest.mark.parametrize("found", ["2 ranks", "FSDP2", "DeepSpeed"])
def test_a_run_that_llamafactory_distributes_is_refused(
    found: str, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if found == "2 ranks":
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    elif found == "FSDP2":
        monkeypatch.setattr(llamafactory, "DTensor", nn.Parameter)
    else:
        monkeypatch.setattr(llamafactory, "is_initialized", lambda: True)
        monkeypatch.setattr(llamafactory, "AcceleratorState", lambda: SimpleNamespace(distributed_type="DEEPSPEED"))
    build = build_hift if section is HIFT else build_sft
    with pytest.raises(ValueError, match=f"this run has {found}. Leave dist_config out"):
        build(tiny_llama(), section)


@pytest.mark.skipif(find_spec("llamafactory") is None, reason="it is not here, and this file imports the module")
def test_nothing_of_llamafactory_is_imported_with_the_module() -> None:
    code = "import sys, slivertune.interop.llamafactory; print('llamafactory' in sys.modules)"
    assert run_python("-c", code, cwd=Path.cwd()).stdout.strip() == "False"


@pytest.mark.skipif(find_spec("llamafactory") is not None, reason="it is here")
def test_without_llamafactory_the_error_names_it() -> None:
    with pytest.raises(ImportError, match=r"Run pip install llamafactory==0\.9\.5"):
        register_optimizers()


@pytest.fixture
def plugin() -> Any:
    """The real registry of LLaMA-Factory's optimizers, as `register_optimizers` leaves it."""
    reason = "LLaMA-Factory is in the environment of `make test-oldest`"
    found = pytest.importorskip("llamafactory.v1.plugins.trainer_plugins.optimizer", reason=reason).OptimizerPlugin
    register_optimizers()
    return found


def make_trainer(folder: Path, section: dict[str, Any] | None, **more: Any) -> Any:
    """LLaMA-Factory's own trainer over chats of random words, two micro-batches of two an update."""
    config = pytest.importorskip("llamafactory.v1.config")
    rendering = pytest.importorskip("llamafactory.v1.core.utils.rendering")
    trainers = pytest.importorskip("llamafactory.v1.trainers.sft_trainer")
    arguments = config.TrainingArguments(
        output_dir=str(folder),
        micro_batch_size=2,
        global_batch_size=4,
        cutoff_len=16,
        learning_rate=1e-2,
        max_steps=UPDATES,
        batching_workers=0,
        optim_config=section,
        **more,
    )
    words = ["good film", "bad play .", "it was great", "terrible , no", "yes ? it was"]
    chats = [
        {"messages": [said("user", words[row % 5]), said("assistant", f"{words[row % 3]} {words[row % 4]}")]}
        for row in range(4 * UPDATES)
    ]
    torch.manual_seed(0)
    return trainers.SFTTrainer(
        arguments, tiny_llama(), rendering.Renderer("chatml", word_tokenizer()), train_dataset=chats
    )


def said(role: str, words: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "value": words}]}


def trained(folder: Path, section: dict[str, Any] | None, **more: Any) -> dict[str, torch.Tensor]:
    trainer = make_trainer(folder, section, **more)
    trainer.fit()
    return state_of(trainer.model)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of what the trainer saves."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore")  # pinned memory without a GPU, and what LLaMA-Factory asks others for
@pytest.mark.parametrize("layers_per_group", [2, LAYERS])
def test_hift_in_llamafactorys_trainer_is_its_own_adamw_rotated_by_hand(
    layers_per_group: int, plugin: Any, tmp_path: Path
) -> None:
    section = HIFT | {"layers_per_group": layers_per_group}
    found = trained(tmp_path, section)
    if layers_per_group == LAYERS:  # one group of all: LLaMA-Factory's own AdamW, clipped by its loop as well
        assert_same(found, trained(tmp_path, None))
        return
    groups = [group.parameter_names for group in build_hift(tiny_llama(), section).groups]
    plugin("by_hand").register()(lambda model, _: HandRotated(model, groups, lr=1e-2, weight_decay=0.01))
    assert_same(found, trained(tmp_path, {"name": "by_hand"}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("section", [HIFT, SFT], ids=["hift", "sft"])
def test_llamafactorys_checkpoints_continue_to_the_same_bits(
    section: dict[str, Any], plugin: Any, tmp_path: Path
) -> None:
    whole = make_trainer(tmp_path, section, save_steps=3)
    before = state_of(whole.model)
    whole.fit()
    whole.save_model()
    expected = state_of(whole.model)
    saved = load_file(tmp_path / "model.safetensors")
    assert_same(saved, expected)
    if section is SFT:
        moved = sum(int((expected[name] != before[name]).sum()) for name in expected)
        assert 0 < moved <= whole.optimizer.num_weights
    for done in (3, 6):
        again = trained(tmp_path / "again", section, resume_from_checkpoint=str(tmp_path / f"checkpoint-{done}"))
        assert_same(again, expected)


@pytest.mark.filterwarnings("ignore")
def test_the_script_of_the_page_trains_from_a_yaml_like_the_pages(
    plugin: Any, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (checkout / "docs" / "trainers.md").read_text(encoding="utf-8")
    script, section = re.findall(r"^```(?:python|yaml)\n(.*?)^```$", page.partition("## LLaMA-Factory")[2], PAGE)
    before = tiny_llama()
    before.save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    chats = [{"messages": [said("user", "good film"), said("assistant", "bad play .")]}] * 8
    (tmp_path / "chats.json").write_text(json.dumps(chats), encoding="utf-8")
    written = {"model": "base", "template": "chatml", "train_dataset": "chats.json", "output_dir": "out"}
    more = {"max_steps": 4, "cutoff_len": 16, "batching_workers": 0, **yaml.safe_load(section)}
    more["optim_config"] |= {"steps_per_group": 1}  # four updates are whole cycles then
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(written | more), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "run.yaml"])
    exec(compile(script, "train.py", "exec"), {})
    saved, old = load_file(tmp_path / "out" / "model.safetensors"), before.state_dict()
    assert all(not torch.equal(saved[name], old[name]) for name in saved)
