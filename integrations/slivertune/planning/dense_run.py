"""Dense fine-tuning: everything that requires a gradient trains in every step; LoRA's adapters among them."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from slivertune.core.adapter_casts import skip_needless_casts
from slivertune.core.layout import Layout
from slivertune.core.ledger import Ledger
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.make import attached
from slivertune.planning.methods import MeasuredSteps, PlannedMethod, given_arguments
from slivertune.planning.optimizers import optimizer_of
from slivertune.planning.recorded_run import make_state, record_update
from slivertune.planning.request import PlanRequest, TaskName
from slivertune.planning.schedule_recorder import ScheduleRecorder
from slivertune.planning.step import Forward, GradientMeter, group_plan, largest_of, measure_step

_ALL_LINEAR = "all-linear"
_PEFT_TASKS: dict[TaskName, str | None] = {
    "causal_lm": "CAUSAL_LM",
    "classification": "SEQ_CLS",
    "image_text": "CAUSAL_LM",
    # PEFT's own forward for sequences to sequences takes tokens, and no sound.
    "speech": None,
}

_WITHOUT_ADAPTER = frozenset({"Llama4Router"})
"""Linear layers of transformers that do not return a tensor."""


class PlannedDense(PlannedMethod):
    """One optimizer over all that trains."""

    bf16_precision = "mixed"

    def measure(self, request: PlanRequest, model: nn.Module, forward: Forward, layout: Layout) -> MeasuredSteps:
        """Run two steps: the first makes the state, all later ones have it from their beginning."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        meter = GradientMeter(model)
        optimizer = _optimizer_over(trained, request)
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

    def record(
        self, request: PlanRequest, model: nn.Module, forward: Forward, recorder: ScheduleRecorder
    ) -> Mapping[int, float]:
        """Record an update that has its state."""
        optimizer = _optimizer_over((each for each in model.parameters() if each.requires_grad), request)
        make_state(optimizer)
        with attached(request, model):
            record_update(recorder, optimizer, forward, num_backwards=request.gradient_accumulation_steps)
        return {0: 1.0}


class PlannedLora(PlannedDense):
    """LoRA: as dense fine-tuning, of small adapters beside frozen weights, by PEFT (Hu et al., 2021)."""

    settings = frozenset({"lora_rank", "lora_dropout", "lora_target_modules"})
    bf16_precision = "bf16"

    def change_model(self, model: Any, request: PlanRequest) -> Any:
        """Put adapters beside all linear layers.

        Raises:
            ImportError: If PEFT is not installed.
            ValueError: If PEFT's adapters can't stand beside all of them.
        """
        for name, module in model.named_modules():
            if type(module).__name__ in _WITHOUT_ADAPTER:
                raise ValueError(
                    f"method='lora' puts adapters beside all linear layers, and PEFT's can't stand beside {name} "
                    f"({type(module).__name__}), which returns several tensors; plan another method"
                )
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise ImportError("method='lora' is PEFT's; install slivertune[peft], or take another method") from error
        config = LoraConfig(
            task_type=_PEFT_TASKS[request.task],
            r=request.lora_rank,
            lora_alpha=2 * request.lora_rank,
            lora_dropout=request.lora_dropout,
            target_modules=_target_modules(request),
        )
        with warnings.catch_warnings():
            # PEFT 0.21 asks by the name that transformers 5.23 retires.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            try:
                adapted: Any = get_peft_model(model, config)
            except ValueError as error:
                raise ValueError(
                    f"lora_target_modules={_target_modules(request)!r} does not fit {type(model).__name__}: {error}"
                ) from error
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()
        skip_needless_casts(adapted)
        return adapted

    def train_arguments(self, request: PlanRequest) -> tuple[str, ...]:
        """The rank, what has adapters, their dropout, and 4-bit weights."""
        names = ("lora_dropout", "lora_target_modules", "load_in_4bit")
        return ("--lora_rank", str(request.lora_rank), *given_arguments(request, names))


def _optimizer_over(parameters: Iterable[nn.Parameter], request: PlanRequest) -> torch.optim.Optimizer:
    optimizer_class, arguments = optimizer_of(request.optimizer, request.kernels)
    with FakeOverrides():
        return optimizer_class(parameters, **arguments)


def _target_modules(request: PlanRequest) -> list[str] | str:
    """As PEFT takes them: names in a list, or its shorthand, which it knows as a string alone."""
    names = request.lora_target_modules
    return _ALL_LINEAR if names in (None, (_ALL_LINEAR,)) else list(names or ())
