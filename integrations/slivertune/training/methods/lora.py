"""`--method lora`: small adapters beside frozen weights, by PEFT (Hu et al., 2021, and QLoRA with 4-bit weights)."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from slivertune.core.adapter_casts import AdapterCastsHandle, skip_needless_casts
from slivertune.core.adapter_targets import adapter_targets
from slivertune.core.atomic import atomic_file
from slivertune.deltas.adapter_folder import TRAINED_CONFIG
from slivertune.training.methods.method import Saved, TrainingMethod
from slivertune.training.models import LoadedModel
from slivertune.training.options.methods import LORA, LoraOptions
from slivertune.training.ranks.coordinator import LaunchCoordinator
from slivertune.training.tasks.task import Task

# PEFT has no task type for masked language models and other packages' models; None selects its general one.
_TASK_OF_KIND: dict[Any, str] = {"causal_lm": "CAUSAL_LM", "sequence_classification": "SEQ_CLS"}
_HEADS = frozenset(("classifier", "score"))
"""Module names by which PEFT itself finds a classifier's head and trains it."""


class LoraMethod(TrainingMethod):
    """LoRA by PEFT. Checkpoints and the final model hold the adapter alone.

    Adapters, and new modules such as a classifier's head, are held in fp32, whatever the dtype of the frozen weights.
    Under autocast, their inputs are not cast to fp32 first: that would change nothing and keep a copy per adapter.
    """

    about = LORA
    requires = "peft"
    bf16_use = "both"
    takes_4bit = True
    parks = True
    options: LoraOptions
    _num_adapted = 0
    _casts: AdapterCastsHandle | None = None

    @classmethod
    def embedded_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the best learning rate of 1e-3, 2e-3 and 4e-3."""
        return {"learning_rate": 4e-3}

    def facts(self) -> dict[str, Any]:
        """Return the settings that define the adapters."""
        options = self.options
        return {
            "lora": {
                "rank": options.lora_rank,
                "alpha": options.alpha,
                "dropout": options.lora_dropout,
                "target_modules": options.target_modules,
            },
            "waiting": None if self.parked is None else self.parked.waiting,
        }

    def adapt(self, loaded: LoadedModel, task: Task) -> Any:
        """Freeze the model and insert the adapters."""
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer

        options = self.options
        found = _HEADS if task.model_kind == "sequence_classification" else frozenset[str]()
        config = LoraConfig(
            revision=loaded.revision,
            task_type=_TASK_OF_KIND.get(task.model_kind),
            r=options.lora_rank,
            lora_alpha=options.alpha,
            lora_dropout=options.lora_dropout,
            **adapter_targets(options.lora_target_modules, loaded.model),
            # New modules have random weights, so they are trained whole. PEFT finds some of them by itself.
            modules_to_save=[path for path in sorted(loaded.new_modules) if not found.intersection(path.split("."))]
            or None,
        )
        try:
            with warnings.catch_warnings():
                # PEFT 0.21 reads the attribute that transformers 5.23 deprecates.
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
                adapted: Any = get_peft_model(loaded.model, config)
        except ValueError as error:
            raise ValueError(
                f"lora_target_modules={options.target_modules!r} does not fit {type(loaded.model).__name__}: {error}"
            ) from error
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()
        self._casts = skip_needless_casts(adapted)
        self._num_adapted = sum(isinstance(module, LoraLayer) for module in adapted.modules())
        return adapted

    def save(self, trainer: Trainer, output_folder: Path, *, base_name: str, coordinator: LaunchCoordinator) -> Saved:
        """Save the adapter and the model's configuration, which alone records classes and quantisation."""
        saved = super().save(trainer, output_folder, base_name=base_name, coordinator=coordinator)
        model: Any = trainer.model
        if coordinator.is_first and saved.model_folder is not None:
            with atomic_file(saved.model_folder / TRAINED_CONFIG) as temporary:
                model.config.to_json_file(temporary)
        return saved

    def lines(self) -> list[str]:
        """Describe the rank, the scale and the number of modules with an adapter."""
        options = self.options
        return [f"  lora    rank {options.lora_rank}, alpha {options.alpha}, on {self._num_adapted} modules"]

    def notes(self, model: torch.nn.Module, *, learning_rate: float | None) -> list[str]:
        """Warn of adapters on a tied weight, such as a head's, which do not change the other modules that share it.

        Also name the linear layers that have no adapter by default.
        """
        notes = [
            f"the adapter of {adapted} does not change {', '.join(others)}, which has the same weight (tied). "
            "`slivertune merge` will write them apart. Leave it out of --lora_target_modules to keep them tied"
            for adapted, others in _adapted_alone(model).items()
        ]
        if left_out := adapter_targets(self.options.lora_target_modules, model)["exclude_modules"]:
            notes.append(f"{', '.join(left_out)} have no adapter: Mamba reads their weights past it")
        return notes

    def settings(self) -> dict[str, Any]:
        """Return LoRA's settings and the number of modules with an adapter."""
        return {**asdict(self.options), "lora_alpha": self.options.alpha, "num_adapted": self._num_adapted}

    def close(self) -> None:
        """Restore PEFT's casts of the adapters' inputs."""
        if self._casts is not None:
            self._casts.remove()


def _adapted_alone(model: torch.nn.Module) -> dict[str, list[str]]:
    """Map the path of each adapted module with a tied weight to the paths of the modules that share the weight."""
    from peft.tuners.lora import LoraLayer

    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path = name.removeprefix("base_model.model.").rpartition(".")[0].removesuffix(".base_layer")
        places.setdefault(id(parameter), []).append(path)
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            name, weight = path.removeprefix("base_model.model."), getattr(module.get_base_layer(), "weight", None)
            if others := [each for each in places.get(id(weight), []) if each != name]:
                found[name] = others
    return found
