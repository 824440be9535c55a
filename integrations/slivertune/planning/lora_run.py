"""LoRA: small adapters beside frozen weights, by PEFT (Hu et al., 2021)."""

import warnings
from typing import Any

import torch

from slivertune.planning.dense_run import PlannedDense
from slivertune.planning.methods import given_arguments
from slivertune.planning.request import PlanRequest


class PlannedLora(PlannedDense):
    """As dense fine-tuning, of the adapters alone."""

    settings = frozenset({"lora_rank"})
    bf16_precision = "bf16"

    def change_model(self, model: Any, request: PlanRequest) -> Any:
        """Put adapters beside all linear layers.

        Raises:
            ImportError: If PEFT is not installed.
        """
        try:
            from peft import LoraConfig, get_peft_model
            from peft.tuners.lora import LoraLayer
        except ImportError as error:
            raise ImportError("method='lora' is PEFT's; install slivertune[peft], or take another method") from error
        config = LoraConfig(
            task_type="CAUSAL_LM" if request.task == "causal_lm" else "SEQ_CLS",
            r=request.lora_rank,
            lora_alpha=2 * request.lora_rank,
            lora_dropout=0.0,
            target_modules="all-linear",
        )
        with warnings.catch_warnings():
            # PEFT 0.21 asks by the name that transformers 5.23 retires.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            adapted: Any = get_peft_model(model, config)
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()
        if request.load_in_4bit:
            # PEFT's layer beside 4-bit weights leaves casts to autocast.
            for module in adapted.modules():
                if isinstance(module, LoraLayer):
                    module.cast_input_dtype_enabled = False
        return adapted

    def train_arguments(self, request: PlanRequest) -> tuple[str, ...]:
        """The rank, and 4-bit weights."""
        return ("--lora_rank", str(request.lora_rank), *given_arguments(request, ("load_in_4bit",)))


METHOD = PlannedLora()
