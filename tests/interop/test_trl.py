"""TRL's trainers with LoRA, whose reference forwards unfreeze all adapters, against an AdamW rotated by hand."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import set_seed

import slivertune
from slivertune import HiFTConfig
from slivertune.hift import HiFT
from slivertune.training.embedded.base_model import VOCABULARY_SIZE, make_byte_tokenizer
from tests.helpers.models import differing, tiny_llama, weights

trl = pytest.importorskip("trl")

LR = 1e-2
ADAM = {"lr": LR, "weight_decay": 0.0, "eps": 1e-8, "betas": (0.9, 0.999)}


class HandRotated(torch.optim.Optimizer):
    """One plain AdamW a group; a gradient of another group is dropped as soon as it arrives."""

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[str]]) -> None:
        named = dict(model.named_parameters())
        self.groups = [[named[name] for name in group] for group in groups]
        super().__init__([parameter for group in self.groups for parameter in group], {"lr": LR})
        self.inner = [torch.optim.AdamW(group, **ADAM) for group in self.groups]
        self.updates = 0
        for group in self.groups:
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(self._keep_active)

    def _keep_active(self, parameter: torch.Tensor) -> None:
        if all(each is not parameter for each in self.groups[self.updates % len(self.groups)]):
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner[self.updates % len(self.groups)].step()
        self.updates += 1


def make(output: Path, kind: str, checkpointing: bool) -> Any:
    arguments: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 7,
        "learning_rate": LR,
        "optim": "adamw_torch",  # as the reference's: the fused one rounds otherwise
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.05,
        "beta": 0.1,
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": checkpointing,
        "seed": 3,
    }
    model = tiny_llama(vocab=VOCABULARY_SIZE)
    adapters = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    tokenizer = make_byte_tokenizer(64)
    torch.manual_seed(0)
    if kind == "dpo":
        rows = [{"prompt": f"a{i}", "chosen": f" yes{i}", "rejected": f" no{i * 7}"} for i in range(16)]
        return trl.DPOTrainer(
            model,
            args=trl.DPOConfig(**arguments, max_length=24),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=adapters,
        )
    rows = [{"prompt": f"a{i}"} for i in range(16)]

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(map(ord, text)) % 17) for text in completions]

    return trl.GRPOTrainer(
        model,
        reward_funcs=reward,
        args=trl.GRPOConfig(**arguments, num_generations=2, max_completion_length=6),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=adapters,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_lora_under_trl_equals_an_adamw_that_is_rotated_by_hand(kind: str, checkpointing: bool, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # trl and peft ask others for what is deprecated
        trainer, reference = (make(tmp_path / name, kind, checkpointing) for name in ("hift", "reference"))
        free = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
        assert len(free) == 12
        before = weights(trainer.model)
        assert differing(before, weights(reference.model)) == []
        hift = slivertune.attach(trainer, HiFTConfig()).optimizer
        assert isinstance(hift, HiFT)
        reference.optimizer = HandRotated(reference.model, [group.parameter_names for group in hift.groups])
        most = []

        def count(*_: Any) -> None:
            most.append(sum(parameter.grad is not None for parameter in trainer.model.parameters()))

        hift.register_step_pre_hook(count)
        for each in (trainer, reference):
            set_seed(3)  # GRPO draws completions
            each.train()
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
