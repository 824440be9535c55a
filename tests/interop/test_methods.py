"""Methods under a stock Trainer: every `optim` of transformers works under `attach` as it does alone, or is refused."""

import re
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from transformers import Trainer
from transformers.training_args import OptimizerNames

import slivertune
from slivertune import HiFT, HiFTConfig, SFTConfig, TokenTune
from slivertune.interop import methods
from slivertune.interop.methods import TrainerHiFT, TrainerMethod, TrainerSFT, method_of, register_trainer_method
from tests.helpers.models import assert_all_moved, assert_same_bits, tiny_llama, token_batches, trainable, weights
from tests.helpers.reference import NaiveHiFT, naive_groups, train
from tests.training.test_callbacks import make_trainer

REFUSED = {
    "lomo": "updates weights inside backward",
    "adalomo": "updates weights inside backward",
    "schedule_free_radam": "swaps the weights",
    "schedule_free_adamw": "swaps the weights",
    "schedule_free_sgd": "swaps the weights",
    "galore_adamw_layerwise": "steps each layer from hooks.*without _layerwise",
    "galore_adamw_8bit_layerwise": "steps each layer from hooks.*without _layerwise",
    "galore_adafactor_layerwise": "steps each layer from hooks.*without _layerwise",
    "apollo_adamw_layerwise": "steps each layer from hooks.*without _layerwise",
    "paged_adamw_32bit": "pages its state",
    "paged_adamw_8bit": "pages its state",
    "paged_ademamix_32bit": "pages its state",
    "paged_ademamix_8bit": "pages its state",
    "paged_lion_32bit": "pages its state",
    "paged_lion_8bit": "pages its state",
}
NOT_HERE = {
    # What the Trainer itself says on a machine without the package, or without a GPU.
    "adamw_torch_xla": "failed to import syncfree AdamW from torch_xla",
    "adamw_torch_npu_fused": "failed to import FusedAdamW from torch_npu",
    "adamw_anyprecision": "install https://github.com/pytorch/torchdistx",
    "grokadamw": "install grokadamw",
    "stable_adamw": "install `torch-optimi`",
}
WORKING = sorted({each.value for each in OptimizerNames} - REFUSED.keys() - NOT_HERE.keys())
VOCAB = 384
"""Embedding and head have 12,288 elements, which torchao and bitsandbytes quantise."""


# GaLore's own, said by each instance.
pytestmark = pytest.mark.filterwarnings("ignore:This implementation of AdamW is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def own_managers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """bitsandbytes keeps overrides for the whole process; torchao compiles its step for every shape, in minutes."""
    monkeypatch.setattr(GlobalOptimManager, "_instance", None)
    # All that GaLore's 8-bit AdamW needs a GPU for.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    with torch.compiler.set_stance("default", force_backend="eager"):
        yield


def trainer_with(optim: str, folder: Path, **options: Any) -> Trainer:
    if optim.startswith(("galore", "apollo")):
        options = {"optim_target_modules": ["mlp", "self_attn"], "optim_args": "rank=4,update_proj_gap=2"} | options
    if optim == "rmsprop":
        options = {"optim_args": "alpha=0.9,momentum=0.5"} | options
    return make_trainer(folder, model=tiny_llama(vocab=VOCAB), optim=optim, weight_decay=0.1, **options)


@pytest.mark.parametrize("optim", REFUSED)
def test_what_cannot_be_rotated_is_refused_by_name(optim: str, tmp_path: Path) -> None:
    trainer = trainer_with(optim, tmp_path)
    message = rf"--optim {optim} can't be HiFT's base optimizer: .*{REFUSED[optim]}"
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        slivertune.attach(trainer, HiFTConfig.paper())
    assert trainer.optimizer is None and trainer.optimizer_cls_and_kwargs is None
    assert all(not p._post_accumulate_grad_hooks for p in trainer.model.parameters())
    assert trainable(trainer.model) == {name for name, _ in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (HiFTConfig.paper(waiting="int8"), "waiting='int8' holds NaN there in place of idle weights"),
        (SFTConfig(density=0.1), "SFT's deltas are parameters that the reference does not have"),
        (HiFTConfig.paper(), None),
    ],
    ids=["waiting weights", "deltas", "all weights exact"],
)
def test_trls_copy_of_all_parameters_to_the_reference_is_refused_where_these_are_not_weights(
    config: Any, text: str | None, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, model=tiny_llama(vocab=VOCAB))
    trainer.args.sync_ref_model = True  # type: ignore[attr-defined]
    with nullcontext() if text is None else pytest.raises(ValueError, match=f"sync_ref_model=True .*{text}"):
        slivertune.attach(trainer, config)
    assert (trainer.optimizer is None) == (text is not None)


@pytest.mark.parametrize("optim", ["schedule_free_adamw", "paged_adamw_8bit"])
def test_sft_steps_by_itself_whatever_is_named(optim: str, tmp_path: Path) -> None:
    trainer = trainer_with(optim, tmp_path, max_steps=2)
    slivertune.attach(trainer, SFTConfig(density=0.1))
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("optim", NOT_HERE)
def test_a_package_that_is_missing_is_named_as_the_trainer_names_it(optim: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, ImportError), match=NOT_HERE[optim]):
        slivertune.attach(trainer_with(optim, tmp_path), HiFTConfig.paper())


@pytest.mark.slow
@pytest.mark.parametrize("optim", WORKING)
def test_with_one_group_it_is_what_the_trainer_does_alone(optim: str, tmp_path: Path) -> None:
    models = []
    for config in (None, HiFTConfig.paper(layers_per_group=5)):
        GlobalOptimManager._instance = None
        trainer = trainer_with(optim, tmp_path, max_steps=4)
        before = weights(trainer.model)
        if config is not None:
            slivertune.attach(trainer, config)
        trainer.train()
        assert_all_moved(trainer.model, before)
        models.append(trainer.model)
    assert_same_bits(*models)


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["galore_adamw", "apollo_adamw", "adamw_torch_8bit"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(optim: str, tmp_path: Path) -> None:
    from apollo_torch.random_projector import GradientProjector
    from galore_torch.galore_projector import GaLoreProjector

    def run(folder: str, stop: int, resume: bool = False) -> Any:
        saving = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
        trainer = trainer_with(optim, tmp_path / folder, max_steps=stop, **saving)
        slivertune.attach(trainer, HiFTConfig.paper(layers_per_group=2))
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer.model

    # As the Trainer needs it for these optimizers without HiFT, too.
    with torch.serialization.safe_globals([GaLoreProjector, GradientProjector]):
        whole = run("whole", 8)
        run("cut", 3)
        assert_same_bits(run("cut", 8, resume=True), whole)


@pytest.mark.slow
@pytest.mark.parametrize("optim", WORKING)
def test_its_groups_are_optimizers_rotated_by_hand(optim: str, tmp_path: Path) -> None:
    trainer = trainer_with(optim, tmp_path)
    # The small embedding keeps 32-bit state anyway, as the Trainer asks for it where it is larger.
    trainer.model = model = tiny_llama()
    hift = slivertune.attach(trainer, HiFTConfig.paper(layers_per_group=2)).optimizer
    assert isinstance(hift, HiFT)
    stock = trainer_with(optim, tmp_path)
    stock.model = dense = tiny_llama()
    base: Any = stock.create_optimizer()
    names = {parameter: name for name, parameter in dense.named_parameters()}
    split = [
        ([names[p] for p in group["params"]], {key: value for key, value in group.items() if key != "params"})
        for group in base.param_groups
    ]
    kind, options = stock.get_optimizer_cls_and_kwargs(stock.args, dense)
    options = {key: value for key, value in options.items() if key != "params"}
    naive = NaiveHiFT(dense, kind, groups=naive_groups(dense, 2), split=split, **options)
    train(dense, naive, token_batches(8), 8)
    train(model, hift, token_batches(8), 8)
    assert_same_bits(model, dense)


@pytest.mark.parametrize(
    ("settings", "config", "said"),
    [
        # Five layers.
        (
            {"max_steps": 10},
            HiFTConfig(layers_per_group=1),
            ["4 of 5 groups of HiFT never .* lower steps_per_group to 2,"],
        ),
        ({"max_steps": 4}, HiFTConfig.paper(), ["1 of 5 groups of HiFT never train: .*Raise layers_per_group, or"]),
        ({"max_steps": 10}, HiFTConfig(layers_per_group=1, steps_per_group=2), []),
        ({"max_steps": 4}, HiFTConfig(layers_per_group=5), []),
        ({"max_steps": 10, "warmup_steps": 4}, HiFTConfig.paper(), ["warm-up of 4 updates .* cycle of 5.* 1/4 of"]),
        ({"max_steps": 10, "warmup_steps": 0.4}, HiFTConfig.paper(), ["warm-up of 4 updates"]),
        ({"max_steps": 10, "warmup_steps": 5}, HiFTConfig.paper(), []),
        ({"max_steps": 10, "warmup_steps": 4, "lr_scheduler_type": "constant"}, HiFTConfig.paper(), []),
        ({"max_steps": 10, "warmup_steps": 4}, SFTConfig(density=0.1), []),
    ],
)
def test_a_schedule_that_leaves_groups_out_or_holds_a_small_rate_is_pointed_at(
    settings: dict[str, Any], config: Any, said: list[str], tmp_path: Path
) -> None:
    trainer = trainer_with("sgd", tmp_path, **settings)
    slivertune.attach(trainer, config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    notes = [str(each.message) for each in caught if "HiFT" in str(each.message)]
    assert len(notes) == len(said) and all(map(re.search, said, notes)), notes


@dataclass(frozen=True, kw_only=True)
class OwnHiFTConfig(HiFTConfig):
    """Settings of a project that has defaults of its own."""

    steps_per_group: int = 2


@pytest.mark.parametrize(
    ("setting", "kind"),
    [(HiFTConfig.paper(), TrainerHiFT), (OwnHiFTConfig(), TrainerHiFT), (SFTConfig(density=0.1), TrainerSFT)],
)
def test_a_method_is_found_by_its_settings_and_those_derived_from_them(setting: object, kind: type) -> None:
    assert type(method_of(setting)) is kind


def test_a_method_of_another_package_is_found_once_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_methods", dict(methods._methods))

    class Settings:
        """Of another method."""

    method = TrainerMethod()
    assert method_of(Settings()) is None
    register_trainer_method(Settings, method)
    assert method_of(Settings()) is method
    assert method_of(TokenTune(ratio=0.5)) is None
