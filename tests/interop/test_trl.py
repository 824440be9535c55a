"""HiFT and SFT under TRL's trainers, against the same trainers with the method done by hand; and resumed.

With LoRA, reference forwards of some of them free all adapters.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import set_seed

import slivertune
from slivertune import SFT, HiFTConfig, SFTConfig, TokenTune, park_layers
from slivertune.hift import HiFT
from tests.helpers.models import differing, weights
from tests.interop.by_hand import HandRotated
from tests.interop.trl_runs import (
    LR,
    SFT_MODES,
    SFT_TAKES_TOKENS,
    mixture_trainer,
    preference_trainer,
    qlora_trainer,
    sft_trainer,
)
from tests.parked.test_park import made_by_hand
from tests.training.test_callbacks import StopAfter

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # trl and peft ask others for what is deprecated

SPARSE = SFTConfig(density=0.1, reselection_interval=4, estimation_steps=2)
CLIPPED: dict[str, Any] = {"max_grad_norm": 0.05}
PREFERENCE_KINDS = ("dpo", "kto", "orpo", "cpo", "grpo", "rloo", "reward")
Make = Callable[..., Any]


def makers(*fast: str) -> Any:
    """Every trainer of TRL that is tested, each mode of SFTTrainer, with LoRA and without; these are not slow."""
    found: dict[str, Make] = {}
    for mode in SFT_MODES:
        found[f"sft, {mode}"] = lambda folder, mode=mode, **options: sft_trainer(folder, mode, **options)
    for kind in PREFERENCE_KINDS:
        for lora in (False, True):
            found[f"{kind}, lora" if lora else kind] = lambda folder, kind=kind, lora=lora, **options: (
                preference_trainer(kind, folder, lora=lora, **options)
            )
    found["sft, label smoothing"] = lambda folder, **options: sft_trainer(folder, label_smoothing_factor=0.1, **options)
    found["sft, qlora"] = qlora_trainer
    found["sft, mixture with the routers' loss"] = lambda folder, **options: mixture_trainer(
        folder, router_aux_loss_coef=0.1, **options
    )
    # What freezes and frees adapters by itself: with a reference, and computed again.
    found["dpo, lora, checkpointed"] = lambda folder, **options: preference_trainer(
        "dpo", folder, lora=True, beta=0.1, gradient_checkpointing=True, **options
    )
    found["grpo, lora, reference"] = lambda folder, **options: preference_trainer(
        "grpo", folder, lora=True, beta=0.1, **options
    )
    found["grpo, lora, reference, checkpointed"] = lambda folder, **options: preference_trainer(
        "grpo", folder, lora=True, beta=0.1, gradient_checkpointing=True, **options
    )
    assert set(fast) <= found.keys()
    marks = {name: [] if name in fast else [pytest.mark.slow] for name in found}
    return pytest.mark.parametrize(
        "make", [pytest.param(make, id=name, marks=marks[name]) for name, make in found.items()]
    )


def train(*trainers: Any) -> None:
    for each in trainers:
        set_seed(3)  # some draw completions
        each.train()


@makers("grpo, lora, reference")
def test_hift_equals_an_adamw_that_is_rotated_by_hand(make: Make, tmp_path: Path) -> None:
    trainer, reference = (make(tmp_path / name, **CLIPPED) for name in ("hift", "reference"))
    free = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    before = weights(trainer.model)
    assert differing(before, weights(reference.model)) == []
    hift = slivertune.attach(trainer, HiFTConfig.paper()).optimizer
    assert isinstance(hift, HiFT)
    reference.optimizer = HandRotated(reference.model, [group.parameter_names for group in hift.groups])
    most = []

    def count(*_: Any) -> None:
        most.append(sum(parameter.grad is not None for parameter in trainer.model.parameters()))

    hift.register_step_pre_hook(count)
    train(trainer, reference)
    assert hift.updates == 7 and hift.skipped_turns == {}
    assert max(most) == max(len(group.parameter_names) for group in hift.groups)
    norms = [
        [entry["grad_norm"] for entry in each.state.log_history if "grad_norm" in entry]
        for each in (trainer, reference)
    ]
    assert norms[0] == norms[1] and len(norms[0]) == 7
    assert differing(weights(trainer.model), weights(reference.model)) == []
    assert set(differing(weights(trainer.model), before)) == free
    assert {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad} == free


@pytest.mark.parametrize("storage", [("int8", "host"), ("exact", "host"), ("nf4", "device")], ids=str)
@makers("grpo, lora, reference", "dpo, lora")
def test_adapters_over_parked_weights_train_as_over_dense_ones(make: Make, storage: Any, tmp_path: Path) -> None:
    trainer, reference = (make(tmp_path / name) for name in ("parked", "dense"))
    if not hasattr(trainer.model, "peft_config") or getattr(trainer.model, "is_quantized", False):
        pytest.skip("nothing is frozen, or is in 4 bits already")
    form, place = storage
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    before = weights(trainer.model)
    made_by_hand(reference.model, form)
    handle = park_layers(trainer.model, form=form, place=place)
    train(trainer, reference)
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (trainer, reference)]
    assert losses[0] == losses[1] and losses[0]
    handle.remove()
    after, dense = weights(trainer.model), weights(reference.model)
    assert differing({name: after[name] for name in trained}, {name: dense[name] for name in trained}) == []
    assert set(differing(after, before)) <= trained and differing(after, before)


def dense_weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: each for name, each in weights(trainer.model).items() if "slivertune" not in name}


@makers("dpo, lora")
def test_sft_equals_a_trainer_that_was_given_the_optimizer(make: Make, tmp_path: Path) -> None:
    trainer, reference = (make(tmp_path / name, **CLIPPED) for name in ("sft", "reference"))
    before = dense_weights(trainer)
    slivertune.attach(trainer, SPARSE)
    arguments = reference.args
    options = {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
    reference.optimizer = SFT(
        reference.model, config=SPARSE, lr=LR, total_steps=7, weight_decay=arguments.weight_decay, **options
    )
    train(trainer, reference)
    assert differing(dense_weights(trainer), dense_weights(reference)) == []
    assert differing(dense_weights(trainer), before) != []


NEEDS_FUSED_HEAD = pytest.mark.skipif(not SFT_TAKES_TOKENS, reason="TokenTune goes with the SFTTrainer of trl 1.15")
RESUMED: dict[str, tuple[Any, ...]] = {
    "hift": (HiFTConfig.paper(),),
    "sft": (SPARSE,),
    "hift and tokens": (HiFTConfig.paper(), TokenTune(ratio=0.5)),
}


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        pytest.param("sft", "hift and tokens", marks=NEEDS_FUSED_HEAD),
        *(
            pytest.param(
                kind,
                method,
                marks=[pytest.mark.slow, *[NEEDS_FUSED_HEAD][: (kind, method) == ("sft, lora", "hift and tokens")]],
            )
            for kind in ("sft", "sft, lora", "dpo, lora", "kto", "reward", "grpo, lora")
            for method in RESUMED
            if (kind, method) != ("sft", "hift and tokens")
            and (method != "hift and tokens" or kind.startswith(("sft", "reward")))
        ),
    ],
)
def test_a_run_that_is_resumed_in_mid_cycle_has_the_bits_of_one_that_never_stopped(
    kind: str, method: str, tmp_path: Path
) -> None:
    def run(name: str, stop: int, resume: bool = False) -> Any:
        options = {**CLIPPED, "max_steps": 11, "save_strategy": "steps", "save_steps": 7}
        name_of, _, adapted = kind.partition(", ")
        if name_of == "sft":
            trainer = sft_trainer(tmp_path / name, adapted or "padding free", **options)
        else:
            trainer = preference_trainer(name_of, tmp_path / name, lora=bool(adapted), **options)
        trainer.add_callback(StopAfter(stop))
        slivertune.attach(trainer, *RESUMED[method])
        set_seed(3)
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer

    whole, cut = run("whole", 11), run("cut", 7)
    again = run("cut", 11, resume=True)
    assert again.state.global_step == 11
    assert differing(dense_weights(again), dense_weights(whole)) == []
    assert differing(dense_weights(again), dense_weights(cut)) != []
