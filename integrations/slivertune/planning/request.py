"""Request for a plan, and its options in `slivertune plan`."""

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from slivertune.core.byte_text import parse_bytes
from slivertune.core.kept_activations import without_checkpointing
from slivertune.core.layout import Layout
from slivertune.core.number_rule import ANY, COUNT, RULES, NumberRule
from slivertune.core.offloaded_activations import offloading_without_checkpointing
from slivertune.core.refused_pairs import refusal_of
from slivertune.core.setting_checks import (
    check_choice,
    check_integer,
    check_layers_per_group,
    check_number,
    layers_or_auto,
)
from slivertune.hift.base import BaseOptimizer
from slivertune.hift.config import GradientPlace, HiFTConfig, MasterKind, StatePlace, WaitingForm, WeightPlace
from slivertune.hift.unsupported import clash_with_layout
from slivertune.planning.kernels import Kernels
from slivertune.planning.methods import clash_with_method, planned, planned_methods
from slivertune.planning.optimizers import OptimizerName, optimizer_of
from slivertune.sft.config import SelectionCriterion
from slivertune.sft.unsupported import clash_of_4bit

AttentionName = Literal["sdpa", "eager"]
PrecisionName = Literal["fp32", "mixed", "mixed_hi", "bf16"]
TaskName = Literal["causal_lm", "classification", "image_text", "speech"]


def option(
    group: str,
    text: str,
    *,
    names: tuple[str, ...] = (),
    read: Callable[[str], Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the metadata of a field that is an option of the command line.

    Args:
        group: Title of its group in `--help`.
        text: Meaning and unit of the field, as shown by `--help`.
        names: Names of the option, if not the field's name alone.
        read: Function that parses its value, if the type alone does not.
        more: Further arguments for argparse.
    """
    about = {"text": text, "group": group, "names": names}
    return {**about, "read": read, "more": more}


def rule_of(item: Field[Any], kind: Any) -> NumberRule | None:
    """Find the rule of a field's numbers, by any name of its option.

    Args:
        item: Field with metadata by `option`.
        kind: Type of its values.

    Returns:
        The rule; None if the field takes no numbers.
    """
    if kind not in (int, float):
        return None
    names = item.metadata["names"] or (item.name,)
    return next((RULES[name.strip("-")] for name in names if name.strip("-") in RULES), COUNT if kind is int else ANY)


def check_value(item: Field[Any], kind: Any, value: Any, *, is_typed: bool = False) -> None:
    """Refuse a value that a field does not take, whatever the other fields are.

    Args:
        item: Field with metadata by `option`.
        kind: Type of its values.
        value: Value of the field; None is allowed if it is the default.
        is_typed: Whether an error names the option instead of the field.

    Raises:
        ValueError: If it is refused. The message names the setting, its value and the rule.
    """
    if value is None and item.default is None:
        return
    if get_origin(kind) is Literal:
        check_choice(item.name, value, get_args(kind))
    if kind is int:
        check_integer(item.name, value)
    elif kind is float:
        check_number(item.name, value)
    if item.name == "layers_per_group":
        check_layers_per_group(value)
    rule = rule_of(item, kind)
    if rule is not None and not rule.allows(value):
        name = (item.metadata["names"] or (f"--{item.name}",))[0]
        raise ValueError(f"{f'{name} {value}' if is_typed else f'{item.name}={value}'} must be {rule.describe()}")


COUNTS = ("density", "num_weights", "equivalent_lora_rank")
"""Fields that set the number of weights that SFT trains, one of which may be given."""
_RUN, _METHODS, _LAYOUT = "the run", "methods", "layout"
_HIFT = HiFTConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """Settings of a run that determine its memory. The names are those of the command line.

    Raises:
        ValueError: If a value is outside the range of its field, or two values contradict each other.
    """

    task: TaskName = field(
        default="causal_lm",
        metadata=option(_RUN, "training task, which decides the model's head; by default what the model was made for"),
    )
    method: str = field(default="hift", metadata=option(_RUN, "training method"))
    optimizer: OptimizerName = field(
        default="adamw",
        metadata=option(_RUN, "optimizer of the trained weights; sft is an optimizer itself, and takes only adamw"),
    )
    precision: PrecisionName = field(
        default="fp32",
        metadata=option(
            _RUN,
            "fp32: fp32 weights; mixed: fp32 weights under bf16 autocast; mixed_hi: bf16 weights with fp32 masters, "
            "hift only (Mixed^Hi of its paper); bf16: bf16 weights without masters. lora's adapters and sft's deltas "
            "stay fp32. With --fit by default mixed_hi for hift, mixed for dense, else bf16",
        ),
    )
    batch_size: int = field(
        default=1,
        metadata=option(
            _RUN, "sequences per forward on each GPU", names=("--batch_size", "--per_device_train_batch_size")
        ),
    )
    gradient_accumulation_steps: int = field(
        default=1,
        metadata=option(
            _RUN,
            "forwards and backwards per update; from the second on, gradients of the first stay allocated",
        ),
    )
    seq_length: int = field(
        default=512,
        metadata=option(_RUN, "unpadded tokens per sequence", names=("--seq_length", "--max_length")),
    )
    images: int = field(
        default=0,
        metadata=option(_RUN, "image_text: images per sequence; their tokens are among seq_length"),
    )
    image_size: int | None = field(
        default=None,
        metadata=option(_RUN, "image_text: pixels per side of an image; by default the size in the model's config"),
    )
    num_labels: int = field(default=2, metadata=option(_RUN, "classes of a classifier"))
    attn_implementation: AttentionName | None = field(
        default=None,
        metadata=option(
            _RUN,
            "attention of the transformers library: sdpa, fused kernels that store no scores; eager, which stores all "
            "scores",
        ),
    )
    gradient_checkpointing: bool = field(
        default=False,
        metadata=option(
            _RUN,
            "store only each block's input, and recompute the block in the backward",
            names=("--gradient_checkpointing", "--activation_checkpointing"),
        ),
    )
    keep_activations: int = field(
        default=0,
        metadata=option(_RUN, "with gradient_checkpointing: blocks, from the top, that keep their activations"),
    )
    offload_activations: bool = field(
        default=False,
        metadata=option(
            _RUN, "with gradient_checkpointing: offload the inputs of blocks to host memory from forward to backward"
        ),
    )
    token_tile_size: int | None = field(
        default=None,
        metadata=option(
            _RUN, "tokens per tile that go through an MLP or a norm at once, recomputed in the backward; by default all"
        ),
    )
    chunked_cross_entropy: bool = field(
        default=True,
        metadata=option(
            _RUN, "compute a causal model's loss in chunks, without storing all logits; no effect on a classifier"
        ),
    )
    token_ratio: float | None = field(
        default=None,
        metadata=option(
            _METHODS,
            "any method: share of the tokens that keep activations and gradients (TokenTune), in (0, 1]; by default "
            "all",
        ),
    )
    layers_per_group: float = field(
        default=float(_HIFT.layers_per_group),
        metadata=option(
            _METHODS,
            "hift: layers per group, trained in one update (m): a number, or a share of the layers; auto: the largest "
            "number that fits --gpu and whose transfers fully overlap with compute",
            read=layers_or_auto,
            metavar="N|SHARE|auto",
        ),
    )
    layers: tuple[str, ...] | None = field(
        default=None,
        metadata=option(
            _METHODS,
            "hift: layers from bottom to top, for models in which they are not found; as for slivertune train",
        ),
    )
    steps_per_group: int = field(
        default=_HIFT.steps_per_group,
        metadata=option(
            _METHODS,
            "hift: updates per turn of a group; with state=discard the second update uses the state of the first",
        ),
    )
    stream_bytes: int = field(
        default=128 * 2**20,
        metadata=option(
            _METHODS,
            "hift: chunk size of a group's masters and state on the GPU while it is stepped (by default 128MiB); 0: "
            "the whole group",
            read=parse_bytes,
            metavar="SIZE",
        ),
    )
    state: StatePlace = field(
        default="host", metadata=option(_METHODS, "hift: storage of state and masters between turns")
    )
    master: MasterKind | None = field(
        default=None,
        metadata=option(
            _METHODS,
            "hift: master weights of bf16 weights, fp32 or none; by default fp32 with mixed_hi, else none",
        ),
    )
    gradients: GradientPlace = field(
        default="device",
        metadata=option(
            _METHODS,
            "hift: storage of gradients until their step; host: in host memory; stepped: none, each tensor is stepped "
            "inside the backward, without clipping",
        ),
    )
    state_ram_bytes: int = field(
        default=0,
        metadata=option(
            _METHODS,
            "hift: with state=disk, host memory for groups that stay resident in it, as many as fit",
            read=parse_bytes,
            metavar="SIZE",
        ),
    )
    save_total_limit: int | None = field(
        default=None,
        metadata=option(
            _METHODS,
            "hift: checkpoints that are kept; on disk they count together with the one being written; by default none "
            "is counted",
        ),
    )
    waiting: WaitingForm | None = field(
        default=None,
        metadata=option(
            _METHODS,
            "hift: store the blocks' idle linear weights in fewer bits, int8 or nf4; exact weights are offloaded to "
            "the host",
        ),
    )
    prefetch_bytes: int = field(
        default=0,
        metadata=option(
            _METHODS,
            "hift: GPU memory that may hold prefetched state; training itself uses the free memory",
            read=parse_bytes,
            metavar="SIZE",
        ),
    )
    weights: WeightPlace = field(
        default="device",
        metadata=option(
            _METHODS,
            "hift: storage of blocks that neither run nor train; host: offload them to host memory, and prefetch each "
            "before its use",
        ),
    )
    resident_bytes: int = field(
        default=0,
        metadata=option(
            _METHODS,
            "hift: with weights=host, bytes of blocks that stay resident on the GPU; training itself uses the free "
            "memory",
            read=parse_bytes,
            metavar="SIZE",
        ),
    )
    density: float | None = field(
        default=None,
        metadata=option(
            _METHODS, "sft: trained share of the weights, in (0, 1]; by default as many weights as LoRA of rank 64"
        ),
    )
    num_weights: int | None = field(
        default=None, metadata=option(_METHODS, "sft: weights trained in all targets together, in place of density")
    )
    equivalent_lora_rank: int | None = field(
        default=None,
        metadata=option(_METHODS, "sft: as many weights as LoRA of this rank would train, in place of density"),
    )
    sft_target_modules: tuple[str, ...] | None = field(
        default=None,
        metadata=option(
            _METHODS,
            "sft: ends of the paths of trained modules, e.g. q_proj v_proj, or of parameter names; by default all "
            "linear layers of the blocks",
        ),
    )
    train_embeddings: bool = field(
        default=False, metadata=option(_METHODS, "sft: train the weights of all embeddings sparsely, too")
    )
    redistribute: bool = field(
        default=False, metadata=option(_METHODS, "sft: let a reselection move weights between tensors")
    )
    packed: bool = field(
        default=False, metadata=option(_METHODS, "sft: deltas and moments in bf16: about half the bytes of state")
    )
    sft_momentum: float = field(
        default=0.0,
        metadata=option(_METHODS, "sft: momentum of SM3, in [0, 1), with selection=momentum; above 0 it is state"),
    )
    selection: SelectionCriterion = field(
        default="accumulated_gradient", metadata=option(_METHODS, "sft: criterion for growing weights")
    )
    reselection_interval: int = field(
        default=20,
        metadata=option(
            _METHODS,
            "sft: updates between two reselections (S); 0 keeps the first choice, and nothing is estimated",
        ),
    )
    estimation_steps: int = field(
        default=5,
        metadata=option(
            _METHODS,
            "sft: updates of AG's estimation phase before a reselection (gamma); with S < 2 gamma the first two "
            "phases overlap, and the candidates of both are stored",
        ),
    )
    replacement_rate: float = field(
        default=0.2,
        metadata=option(
            _METHODS,
            "sft: largest share of weights that a reselection after the first replaces (alpha), in [0, 1]; it bounds "
            "the candidates of the second of two overlapping phases",
        ),
    )
    lora_rank: int = field(default=16, metadata=option(_METHODS, "lora: rank of the adapters (r)"))
    lora_dropout: float = field(
        default=0.0,
        metadata=option(
            _METHODS, "lora: dropout on an adapter's input, in [0, 1); above 0 each adapter keeps its own input"
        ),
    )
    lora_target_modules: tuple[str, ...] | None = field(
        default=None,
        metadata=option(
            _METHODS,
            "lora: names of the modules that get an adapter, e.g. q_proj v_proj; by default every linear layer but the "
            "head",
        ),
    )
    load_in_4bit: bool = field(
        default=False,
        metadata=option(_METHODS, "lora, sft: store the blocks' frozen linear layers in NF4"),
    )
    kernels: Kernels = field(
        default="gpu",
        metadata=option(
            _RUN,
            "kernels and copies to count: those of a GPU, or of the CPU for a run of slivertune train there",
        ),
    )
    layout: Layout = field(default="single", metadata=option(_LAYOUT, "distribution of the run over GPUs"))
    num_gpus: int = field(
        default=1,
        metadata=option(_LAYOUT, "GPUs of the layout; all figures are per GPU, and per process on the host"),
    )
    offload_parameters: bool = field(
        default=False,
        metadata=option(
            _LAYOUT,
            "fsdp2, zero3: offload parameters to the host and stream them layer by layer (FSDP2's CPU offload, "
            "ZeRO-3's offload_param)",
        ),
    )

    def __post_init__(self) -> None:
        check_choice("method", self.method, planned_methods())
        for item in fields(self):
            check_value(item, KINDS[item.name], getattr(self, item.name))
        for name in ("sft_target_modules", "lora_target_modules", "layers"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} is empty. Name modules, or leave it out for the default")
        refusals = (
            *self._clashes_with_task(),
            *self._clashes_with_precision(),
            *self._clashes_with_method(),
            *self._clashes_with_layout(),
        )
        for is_refused, reason in refusals:
            if is_refused:
                raise ValueError(reason)
        if (clash := self._clash_in_training()) is not None:
            raise ValueError(clash)

    @property
    def master_kind(self) -> MasterKind:
        """Kind of master weights behind 16-bit weights."""
        return self.master or ("fp32" if self.precision == "mixed_hi" else "none")

    @property
    def has_bf16_weights(self) -> bool:
        """Whether weights are stored in bf16, not fp32. Products with 4-bit weights use the same dtype."""
        return self.precision in ("bf16", "mixed_hi")

    @property
    def num_backwards(self) -> int:
        """Number of an update's forwards and backwards to run: at most 2, since the third is like the second."""
        return min(self.gradient_accumulation_steps, 2)

    @property
    def has_phases(self) -> bool:
        """Whether SFT has estimation phases."""
        return self.selection == "accumulated_gradient" and self.reselection_interval > 0

    @property
    def has_autocast(self) -> bool:
        """Whether operators compute in bf16 by autocast, as with `slivertune train --bf16` for the method."""
        return self.precision == "mixed" or (self.precision == "bf16" and (self.method == "lora" or self.load_in_4bit))

    def _clashes_with_task(self) -> tuple[tuple[object, str], ...]:
        return (
            (
                self.num_labels != 2 and self.task != "classification",
                (
                    f"num_labels={self.num_labels} with task={self.task!r}, which has no classes. Use "
                    "task='classification', or leave it out"
                ),
            ),
            (
                self.images and self.task != "image_text",
                f"images={self.images} with task={self.task!r}, which has none. Use task='image_text', or images=0",
            ),
            (
                self.image_size is not None and not self.images,
                f"image_size={self.image_size} with images=0. Give images, their number per sequence, or leave it out",
            ),
            (
                self.token_ratio is not None and (self.images or self.task == "speech"),
                (
                    f"token_ratio={self.token_ratio} selects tokens of text, and has no plan with images or speech. "
                    "Leave it out"
                ),
            ),
        )

    def _clashes_with_precision(self) -> tuple[tuple[object, str], ...]:
        return (
            (
                self.precision == "mixed_hi" and "master" not in planned(self.method).settings,
                (
                    f"precision='mixed_hi' is HiFT's, and method={self.method!r} keeps no masters. Use 'mixed' (fp32 "
                    "weights under autocast) or 'bf16', or method='hift' with all layers in one group"
                ),
            ),
            (
                self.precision == "mixed_hi" and self.master == "none",
                "precision='mixed_hi' means masters, and master='none' has none. Use precision='bf16'",
            ),
            (
                self.precision != "mixed_hi" and self.master_kind != "none",
                (
                    f"master={self.master!r} is for bf16 weights, which precision={self.precision!r} does not train on "
                    "masters. Use precision='mixed_hi'"
                ),
            ),
        )

    def _clashes_with_method(self) -> tuple[tuple[object, str | None], ...]:
        method, clash_of_4bit_weights = planned(self.method), clash_with_method(self.method)
        counts = [f"{name}={value}" for name in COUNTS if (value := getattr(self, name)) is not None]
        return (
            (self.load_in_4bit and clash_of_4bit_weights, clash_of_4bit_weights),
            (
                self.load_in_4bit and self.precision not in ("fp32", "bf16"),
                f"load_in_4bit computes in precision 'bf16' or 'fp32', not {self.precision!r}",
            ),
            (
                method.is_optimizer and self.optimizer != "adamw",
                (
                    f"optimizer={self.optimizer!r} does not go with method={self.method!r}, which is an optimizer "
                    "itself. Leave it out"
                ),
            ),
            (
                "density" in method.settings and len(counts) > 1,
                f"{' and '.join(counts)} both set how many weights are trained. Give one",
            ),
            (
                self.sft_momentum and self.selection != "momentum",
                (
                    f"sft_momentum={self.sft_momentum} is SM3's, and selection={self.selection!r} does not train by "
                    "SM3. Use selection='momentum', or leave it out"
                ),
            ),
            (
                "reselection_interval" in method.settings
                and self.has_phases
                and self.reselection_interval <= self.estimation_steps,
                (
                    f"reselection_interval={self.reselection_interval} must be greater than "
                    f"estimation_steps={self.estimation_steps}, the last updates of each interval"
                ),
            ),
            (
                self.state != "disk" and self.state_ram_bytes,
                (
                    f"state_ram_bytes={self.state_ram_bytes} keeps some groups of state='disk' in memory. With "
                    f"state={self.state!r} leave it out"
                ),
            ),
            (
                self.state == "device" and self.prefetch_bytes,
                f"prefetch_bytes={self.prefetch_bytes} is for offloaded state. With state='device' leave it out",
            ),
            (
                self.gradients != "device" and "gradients" not in method.settings,
                f"gradients={self.gradients!r} is HiFT's. method={self.method!r} has no such choice. Leave it out",
            ),
            (
                self.gradients == "host" and self.state == "device",
                "gradients='host' come back with the state, which state='device' does not move. Use state='host'",
            ),
            (
                self.waiting and "waiting" not in method.settings,
                f"waiting={self.waiting!r} is HiFT's. method={self.method!r} has no idle layers. Leave it out",
            ),
            (
                self.waiting and self.state not in ("host", "disk"),
                f"waiting={self.waiting!r} stores exact weights with the offloaded state. Use state='host'",
            ),
            (
                self.weights == "host" and "weights" not in method.settings,
                f"weights='host' is HiFT's. method={self.method!r} keeps weights on the device. Leave it out",
            ),
            (
                self.weights == "host" and self.state == "device",
                "weights='host' needs offloaded state. Use state='host' with it",
            ),
            (
                self.resident_bytes and self.weights == "device",
                f"resident_bytes={self.resident_bytes} is for offloaded weights. Use weights='host', or leave it out",
            ),
        )

    def _clashes_with_layout(self) -> tuple[tuple[object, str], ...]:
        return (
            (
                self.offload_parameters and self.layout not in ("fsdp2", "zero3"),
                (
                    f"offload_parameters streams parameters by FSDP2 or ZeRO-3, and layout={self.layout!r} keeps them "
                    "on the GPU. Use layout='fsdp2' or 'zero3', also on one GPU"
                ),
            ),
            (
                self.layers is not None and self.layout != "single",
                (
                    f"layers={self.layers} with layout={self.layout!r}, whose units are the blocks that are found in "
                    "the model. Use layout='single'"
                ),
            ),
            (
                self.layout == "single" and self.num_gpus > 1,
                (
                    f"num_gpus={self.num_gpus} with layout='single', which is one GPU. Use 'ddp', 'fsdp2', 'zero1', "
                    "'zero2' or 'zero3'"
                ),
            ),
            (
                self.layout != "single" and self.num_gpus < 2 and not self.offload_parameters,
                f"layout={self.layout!r} needs at least 2 GPUs, and num_gpus={self.num_gpus}. Use layout='single'",
            ),
        )

    def _clash_in_training(self) -> str | None:
        """Return the message with which training would refuse this run, or None."""
        if self.keep_activations and not self.gradient_checkpointing:
            return without_checkpointing(self.keep_activations)
        if self.offload_activations and not self.gradient_checkpointing:
            return offloading_without_checkpointing()
        refusal = refusal_of(
            {
                "tile_tokens": None if self.token_tile_size is None else "--token_tile_size",
                "load_in_4bit": "--load_in_4bit" if self.load_in_4bit else None,
                "zero3": "ZeRO-3" if self.layout == "zero3" else None,
            }
        )
        if refusal is not None:
            return refusal
        if self.load_in_4bit and self.method == "sft":
            return clash_of_4bit(self.layout, "each target with load_in_4bit")
        if self.method != "hift" or self.layout == "single":
            return None
        optimizer_class, arguments = optimizer_of(self.optimizer)
        clash = clash_with_layout(
            self.layout,
            BaseOptimizer.of_class(optimizer_class, arguments, None),
            state=self.state,
            master="fp32" if self.precision in ("fp32", "mixed") else self.master_kind,
            gradients=self.gradients,
            state_ram_bytes=self.state_ram_bytes,
            waiting=self.waiting,
            weights=self.weights,
        )
        return f"{clash} (precision='mixed_hi')" if clash is not None and "master=" in clash else clash


def kinds_of(request_class: type) -> dict[str, Any]:
    """Return the type of each field by name, without None: `int`, `float`, `bool`, `str`, or a `Literal`."""
    return {
        name: next((kind for kind in get_args(hint) if NoneType in get_args(hint) and kind is not NoneType), hint)
        for name, hint in get_type_hints(request_class).items()
    }


KINDS = kinds_of(PlanRequest)
"""Types of a request's fields, by name."""
