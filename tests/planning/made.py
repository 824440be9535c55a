"""Plans and configurations made by hand."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slivertune.planning.configs import ModelFigures
from slivertune.planning.make import make_plan
from slivertune.planning.plan import GroupPlan, Moment, Phase, Plan
from slivertune.planning.request import PlanRequest

GIB = 2**30

TINY_FIGURES: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
HIDDEN, MLP, VOCABULARY = 64, 96, 200
"""Widths of a `narrow_llama`."""
IN_BLOCK = HIDDEN * (64 + 32 + 32 + 64) + 3 * HIDDEN * MLP
"""Weights of its blocks' matrix products."""


def narrow_llama(num_blocks: int) -> LlamaConfig:
    """A Llama of so many blocks, half as many key heads as heads, and an untied head."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=num_blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def weights_of_narrow_llama(num_blocks: int) -> int:
    """How many weights it has."""
    return num_blocks * (IN_BLOCK + 2 * HIDDEN) + 2 * VOCABULARY * HIDDEN + HIDDEN


def rotary_operations(length: int, head_size: int) -> int:
    """Of the angles of a Llama's positions, which transformers 5.16 computes as a product of matrices."""
    return length * head_size if " @ " in inspect.getsource(LlamaRotaryEmbedding.forward) else 0


_known: dict[tuple[PlanRequest, str], Plan] = {}


def plan_made_once(request: PlanRequest, config: PreTrainedConfig) -> Plan:
    """The plan of a request, made when it is first asked for: it depends on nothing else."""
    key = request, config.to_json_string()
    if key not in _known:
        _known[key] = make_plan(request, config)
    return _known[key]


def planner_by(make: Callable[[PlanRequest, PreTrainedConfig], Plan]) -> Callable[[PreTrainedConfig], Any]:
    """Return a stand-in for `Planner` that has its plans from a function."""
    return lambda config: SimpleNamespace(plan=lambda request: make(request, config))


def write_config(folder: Path, **changes: Any) -> Path:
    """A folder with the configuration of a tiny Llama, some of its figures changed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY_FIGURES, **changes}), encoding="utf-8")
    return folder


def tiny_model(**changes: Any) -> ModelFigures:
    """A tiny Llama that was found somewhere, some of its figures changed."""
    figures = {name: value for name, value in {**TINY_FIGURES, **changes}.items() if name != "model_type"}
    return ModelFigures(
        name="tiny",
        source="a test",
        name_or_path="owner/tiny",
        config=LlamaConfig(**figures),
    )


def moment(
    group: int = 0,
    phase: Phase = "backward",
    *,
    parameters: int = 0,
    gradients: int = 0,
    state: int = 0,
    residual: int = 0,
) -> Moment:
    """Bytes alive at a peak."""
    return Moment(group=group, phase=phase, parameters=parameters, gradients=gradients, state=state, residual=residual)


def group(index: int, name: str, peak: Moment, *, num_alike: int = 1, num_parameters: int = 7) -> GroupPlan:
    """A step of one of several groups alike."""
    return GroupPlan(
        index=index,
        indices=tuple(range(index, index + num_alike)),
        name=name,
        num_parameters=num_parameters,
        gradient_bytes=11,
        state_bytes=13,
        master_bytes=17,
        peak=peak,
    )


def plan(
    request: PlanRequest, *groups: GroupPlan, host_bytes: int = 0, disk_bytes: int = 0, notes: tuple[str, ...] = ()
) -> Plan:
    """A plan of these groups."""
    peak = max((each.peak for each in groups), key=lambda each: each.total)
    return Plan(
        request=request,
        peak=peak,
        groups=groups,
        num_parameters=1234567,
        num_trainable_peak=7,
        parameter_bytes=peak.parameters,
        gradient_bytes=11,
        state_bytes=13,
        residual_bytes=peak.residual,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        notes=notes,
    )


def simple_plan(request: PlanRequest, peak: Moment, *, host_bytes: int = 0, disk_bytes: int = 0) -> Plan:
    """A plan with one group."""
    return plan(request, group(0, "all", peak), host_bytes=host_bytes, disk_bytes=disk_bytes)
