"""Dense fine-tuning: everything that requires a gradient trains in every step; LoRA's adapters among them."""

import warnings
from typing import Any

import torch
from torch import nn

from slivertune.core.layout import Layout
from slivertune.core.ledger import Ledger
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.make import attached
from slivertune.planning.methods import MeasuredSteps, PlannedMethod, given_arguments
from slivertune.planning.optimizers import optimizer_of
from slivertune.planning.request import PlanRequest
from slivertune.planning.step import Forward, GradientMeter, group_plan, largest_of, measure_step


class PlannedDense(PlannedMethod):
    """One optimizer over all that trains."""

    bf16_precision = "mixed"

    def measure(self, request: PlanRequest, model: nn.Module, forward: Forward, layout: Layout) -> MeasuredSteps:
        """Run two steps: the first makes the state, all later ones have it from their beginning."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        meter = GradientMeter(model)
        optimizer_class, arguments = optimizer_of(request.optimizer)
        with FakeOverrides():
            optimizer = optimizer_class(trained, **arguments)
        with attached(request, model) as notes, Ledger(model) as ledger:
            peak = largest_of(
                [measure_step(ledger, forward, optimizer, num_backwards=request.num_backwards) for _ in range(2)]
            )
        state = [value for values in optimizer.state.values() for value in values.values()]
        return MeasuredSteps(
            groups=[
                group_plan(
                    peak,
                    name="all",
                    num_parameters=sum(parameter.numel() for parameter in trained),
                    gradient_bytes=meter.bytes_of(trained),
                    state_bytes=sum(each.nbytes for each in state if isinstance(each, torch.Tensor)),
                )
            ],
            notes=notes,
        )


class PlannedLora(PlannedDense):
    """LoRA: as dense fine-tuning, of small adapters beside frozen weights, by PEFT (Hu et al., 2021)."""

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
