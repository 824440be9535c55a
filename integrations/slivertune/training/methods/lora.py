"""`--method lora`: small adapters beside frozen weights, by PEFT (Hu et al., 2021; with 4-bit weights QLoRA)."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from slivertune.training.methods.method import TrainingMethod
from slivertune.training.options.lora import LoraArguments
from slivertune.training.options.method import Method
from slivertune.training.tasks.task import ModelKind, Task

# PEFT has no kind of its own for masked language models, which its general one serves.
_TASK_OF_KIND: dict[ModelKind, str] = {"causal_lm": "CAUSAL_LM", "sequence_classification": "SEQ_CLS"}
_HEADS = frozenset(("classifier", "score"))
"""Names under which PEFT itself looks for a classifier's head and trains it."""


class LoraMethod(TrainingMethod):
    """PEFT's LoRA; a checkpoint and the final model are its adapter.

    Adapters, and new modules such as a classifier's head, are held in fp32 whatever the frozen weights are held in.

    Args:
        arguments: LoRA's settings.
        revision: That of the model on the hub, which the adapter remembers.
    """

    name: Method = "lora"

    def __init__(self, arguments: LoraArguments, revision: str | None = None) -> None:
        self._arguments = arguments
        self._revision = revision
        self._num_adapted = 0

    def facts(self) -> dict[str, Any]:
        """What decides the adapters."""
        arguments = self._arguments
        return {
            "lora": {
                "rank": arguments.lora_rank,
                "alpha": arguments.alpha,
                "dropout": arguments.lora_dropout,
                "target_modules": arguments.target_modules,
            }
        }

    def adapt(self, model: PreTrainedModel, task: Task, new_modules: Collection[str]) -> Any:
        """Freeze the model and put the adapters in."""
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer

        arguments = self._arguments
        config = LoraConfig(
            revision=self._revision,
            task_type=_TASK_OF_KIND.get(task.model_kind),
            r=arguments.lora_rank,
            lora_alpha=arguments.alpha,
            lora_dropout=arguments.lora_dropout,
            target_modules=arguments.target_modules,
            modules_to_save=_modules_to_save(task, new_modules),
        )
        try:
            with warnings.catch_warnings():
                # PEFT 0.21 asks by the name that transformers 5.23 retires.
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
                adapted: Any = get_peft_model(model, config)
        except ValueError as error:
            raise ValueError(
                f"lora_target_modules={arguments.target_modules!r} does not fit {type(model).__name__}: {error}"
            ) from error
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()
        self._num_adapted = sum(isinstance(module, LoraLayer) for module in adapted.modules())
        return adapted

    def lines(self) -> list[str]:
        """Rank, scale and how many modules have an adapter."""
        arguments = self._arguments
        return [f"  lora    rank {arguments.lora_rank}, alpha {arguments.alpha}, on {self._num_adapted} modules"]

    def settings(self) -> dict[str, Any]:
        """All of LoRA's settings, and the number of modules with an adapter."""
        return {**asdict(self._arguments), "lora_alpha": self._arguments.alpha, "num_adapted": self._num_adapted}


def _modules_to_save(task: Task, new_modules: Collection[str]) -> list[str] | None:
    """Modules that are trained whole, since nothing is known to them: what PEFT does not find by itself."""
    found_by_peft = _HEADS if task.model_kind == "sequence_classification" else frozenset[str]()
    names = [path for path in sorted(new_modules) if not found_by_peft.intersection(path.split("."))]
    return names or None
