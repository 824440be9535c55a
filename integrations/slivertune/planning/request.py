"""Request for a plan: the settings of a run that determine its memory and time."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_origin

from slivertune.core.kept_activations import without_checkpointing
from slivertune.core.layout import Layout
from slivertune.core.number_rule import ANY, COUNT, RULES, NumberRule
from slivertune.core.offloaded_activations import offloading_without_checkpointing
from slivertune.core.options import Bytes, Option, Spelling, options_of
from slivertune.core.refused_pairs import refusal_of
from slivertune.core.setting_checks import (
    check_choice,
    check_integer,
    check_layers_per_group,
    check_number,
    layers_or_auto,
)
from slivertune.hift.base import BaseOptimizer
from slivertune.hift.config import (
    CompileChoice,
    GradientPlace,
    HiFTConfig,
    InactiveLayers,
    MasterKind,
    StatePlace,
)
from slivertune.hift.unsupported import STEPPED_ONCE, clash_of_rounding, clash_with_layout
from slivertune.parked.forms import CodesForm, WeightPlace
from slivertune.planning.kernels import Kernels
from slivertune.planning.methods import clash_with_method, planned, planned_methods
from slivertune.planning.optimizers import PAGED, OptimizerName, optimizer_of
from slivertune.sft.config import NAMES_OF_OPTIONS, SelectionCriterion, SFTConfig
from slivertune.sft.unsupported import clash_of_4bit, clash_of_parking

AttentionName = Literal["sdpa", "eager"]
PrecisionName = Literal["fp32", "mixed", "mixed_hi", "bf16"]
TaskName = Literal["causal_lm", "classification", "image_text", "speech"]
RecipeName = Literal["peft-kbit", "peft-8bit", "peft-loop"]

PARKED_BY = "HiFT, LoRA and SFT"
"""Methods that leave weights of blocks frozen, which can be parked."""
COUNTS = ("density", "num_weights", "equivalent_lora_rank")
"""Fields that set the number of weights that SFT trains, one of which may be given."""
_HIFT, _SFT = HiFTConfig(), SFTConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """Settings of a run that determine its memory.

    A field without a docstring is an option of `slivertune train` and means the same; most of them are fields of
    `HiFTConfig` and `SFTConfig`. It takes no `auto`, which stands for what only a run can find out.

    Raises:
        ValueError: If a value is outside the range of its field, or two values contradict each other.
    """

    task: TaskName = "causal_lm"
    """Training task, which decides the model's head. By default what the model was made for."""
    method: str = "hift"
    optimizer: OptimizerName = "adamw"
    """In place of optim: the optimizer of the trained weights. sft is an optimizer itself, and takes only adamw."""
    precision: PrecisionName = "fp32"
    """In place of bf16 and weights_dtype. fp32 weights are fp32 or, under bf16 autocast, mixed. bf16
    weights are mixed_hi with fp32 masters (hift only, Mixed^Hi of its paper), or bf16 without masters, which hift may
    round stochastically (master). Adapters of lora and deltas of sft stay fp32. By default that of slivertune train
    without bf16 and weights_dtype: the dtype of the checkpoint with hift and sft, else fp32. A search by --fit without
    a run file begins with mixed_hi for hift, mixed for dense, bf16 for others."""
    batch_size: int = 8
    """Sequences per forward on each GPU."""
    gradient_accumulation_steps: int = 1
    seq_length: int = 1024
    """Unpadded tokens per sequence. By default 1,024, or as many as the model takes."""
    images: int = 0
    """Images per sequence with --task image_text. Their tokens are among seq_length."""
    image_size: int | None = None
    """Pixels per side of an image with --task image_text. By default the size in the model's config."""
    num_labels: int = 2
    """Classes of a classifier."""
    attn_implementation: AttentionName | None = None
    gradient_checkpointing: bool = False
    keep_activations: int = 0
    offload_activations: bool = False
    token_tile_size: int | None = None
    chunked_cross_entropy: bool = True
    token_ratio: float | None = None
    layers_per_group: Annotated[float | Literal["all"], Spelling(read=layers_or_auto)] = float(_HIFT.layers_per_group)
    layers: tuple[str, ...] | None = None
    steps_per_group: int = _HIFT.steps_per_group
    device_bytes: Bytes | None = None
    stream_bytes: Bytes = _HIFT.stream_bytes
    state: StatePlace = _HIFT.state
    master: MasterKind | None = None
    gradients: GradientPlace = _HIFT.gradients
    inactive: InactiveLayers = _HIFT.inactive
    compile_step: CompileChoice = _HIFT.compile_step
    state_ram_bytes: Bytes = _HIFT.state_ram_bytes
    save_total_limit: int | None = None
    waiting: CodesForm | None = _HIFT.waiting
    prefetch_bytes: Bytes | None = None
    weights: WeightPlace = _HIFT.weights
    resident_bytes: Bytes | None = None
    density: float | None = None
    num_weights: int | None = None
    equivalent_lora_rank: int | None = None
    sft_target_modules: tuple[str, ...] | None = None
    train_embeddings: bool = _SFT.embeddings
    redistribute: bool = _SFT.redistribute
    packed: bool = _SFT.packed
    sft_momentum: float = 0.0
    selection: SelectionCriterion = _SFT.selection
    reselection_interval: int = _SFT.reselection_interval
    estimation_steps: int = _SFT.estimation_steps
    replacement_rate: float = _SFT.replacement_rate
    lora_rank: int = 16
    lora_dropout: float = 0.0
    lora_target_modules: tuple[str, ...] | None = None
    load_in_4bit: bool = False
    recipe: RecipeName | None = None
    """Script of another library that is planned in place of slivertune train. peft-kbit is LoRA over 4-bit weights
    after PEFT's prepare_model_for_kbit_training, under the Trainer: all other weights are fp32, and so are the logits,
    of which none are left out. peft-8bit is the same over LLM.int8 weights of bitsandbytes. peft-loop is LoRA by PEFT,
    prepared so over 4-bit weights, in a loop without autocast that keeps the model's outputs until the next step."""
    kernels: Kernels = "gpu"
    """Kernels and copies to count: those of a GPU, or of the CPU for a run of slivertune train there."""
    layout: Layout = "single"
    """Distribution of the run over GPUs."""
    num_gpus: int = 1
    """GPUs of the layout. All figures are per GPU, and per process on the host."""
    offload_parameters: bool = False
    """Fsdp2, zero3: offload parameters to the host and stream them layer by layer (FSDP2's CPU offload, ZeRO-3's
    offload_param)."""

    def __post_init__(self) -> None:
        check_choice("method", self.method, planned_methods())
        for option in REQUEST_OPTIONS.values():
            check_value(option, getattr(self, option.name))
        for name in ("sft_target_modules", "lora_target_modules", "layers"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} is empty. Name modules, or leave it out for the default")
        for is_refused, reason in (
            *self._clashes_with_task(),
            *self._clashes_with_precision(),
            *self._clashes_with_method(),
            *self._clashes_with_recipe(),
            *self._clashes_with_layout(),
        ):
            if is_refused:
                raise ValueError(reason)
        self.hift_config()
        if "density" in planned(self.method).settings:
            self.sft_config()
        if (clash := self._clash_in_training()) is not None:
            raise ValueError(clash)

    def hift_config(self, **others: Any) -> HiFTConfig:
        """Return the settings of HiFT.

        Args:
            others: Other values of some fields.

        Raises:
            ValueError: If HiFT refuses one.
        """
        # A plan writes no file, so that it needs no folder for them.
        own: dict[str, Any] = {"master": self.master_kind, "state_dir": "." if self.state == "disk" else None}
        # A plan measures nothing: what is not given is 0, or a share of the budget.
        own["device_bytes"] = "auto" if self.device_bytes is None else self.device_bytes
        for name in ("prefetch_bytes", "resident_bytes"):
            if getattr(self, name) is None:
                own[name] = 0 if self.device_bytes is None else "auto"
        if self.compile_step == "auto":
            own["compile_step"] = "always" if self.kernels == "gpu" else "never"
        return HiFTConfig(**{**{name: getattr(self, name) for name in _OF_HIFT}, **own, **others})

    def sft_config(self, **others: Any) -> SFTConfig:
        """Return the settings of SFT.

        Args:
            others: Other values of some fields.

        Raises:
            ValueError: If SFT refuses one.
        """
        return SFTConfig(**{**{item: getattr(self, name) for item, name in _OF_SFT.items()}, **others})

    @property
    def master_kind(self) -> MasterKind:
        """Kind of master weights behind 16-bit weights. fp32 weights have none."""
        return "fp32" if self.precision == "mixed_hi" else (self.master or "none")

    @property
    def has_bf16_weights(self) -> bool:
        """Whether weights are stored in bf16, not fp32. Products with 4-bit weights use the same dtype."""
        return self.precision in ("bf16", "mixed_hi")

    @property
    def parks(self) -> bool:
        """Whether weights of blocks are quantised or on the host while they do not train."""
        return self.waiting is not None or self.weights == "host"

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
        adapts = self.method == "lora" or self.load_in_4bit
        return self.precision == "mixed" or (self.precision == "bf16" and adapts and self.recipe != "peft-loop")

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
                self.precision == "mixed_hi" and self.master not in (None, "fp32"),
                f"precision='mixed_hi' means masters, and master={self.master!r} has none. Use precision='bf16'",
            ),
            (
                self.master == "stochastic" and "master" not in planned(self.method).settings,
                f"master='stochastic' is read by HiFT, not by method={self.method!r}. Leave it out",
            ),
            (
                self.precision in ("fp32", "mixed") and self.master == "stochastic",
                (
                    f"master='stochastic' rounds weights to bf16, and precision={self.precision!r} stores fp32. Use "
                    "precision='bf16', or leave master out"
                ),
            ),
            (
                self.precision == "bf16" and self.master == "fp32",
                (
                    "precision='bf16' trains bf16 weights without masters, and master='fp32' has them. Use "
                    "precision='mixed_hi'"
                ),
            ),
        )

    def _clashes_with_method(self) -> tuple[tuple[object, str | None], ...]:
        method, clash_of_4bit_weights = planned(self.method), clash_with_method(self.method)
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
                self.optimizer in PAGED and (method.trains_in_groups or self.layout not in ("single", "ddp")),
                (
                    f"optimizer={self.optimizer!r} is planned for method='dense' and 'lora', on one GPU or under ddp. "
                    "Use 'adamw' or 'adamw8bit'"
                ),
            ),
            (
                self.sft_momentum and self.selection != "momentum",
                (
                    f"sft_momentum={self.sft_momentum} is for SM3, and selection={self.selection!r} trains by AdamW. "
                    "Use selection='momentum', or leave it out"
                ),
            ),
            *(
                (
                    getattr(self, name) != getattr(_HIFT, name) and name not in method.settings,
                    f"{name}={getattr(self, name)!r} is read by {readers}, not by method={self.method!r}. Leave it out",
                )
                for name, readers in (("gradients", "HiFT"), ("waiting", PARKED_BY), ("weights", PARKED_BY))
            ),
            (
                self.device_bytes is not None and self.method in ("lora", "sft") and self.weights == "device",
                f"device_bytes={self.device_bytes} is for weights on the host. Set weights='host', or leave it out",
            ),
            (
                self.device_bytes is not None and "device_bytes" not in method.settings,
                f"device_bytes={self.device_bytes} is read by {PARKED_BY}, not by method={self.method!r}. Leave it out",
            ),
            (
                self.parks and self.method != "hift" and self.layout not in ("single", "ddp"),
                (
                    f"waiting={self.waiting!r} and weights={self.weights!r} with layout={self.layout!r}, whose ranks "
                    "hold shards of weights. Use layout='single' or 'ddp', or leave them out"
                ),
            ),
        )

    def _clashes_with_recipe(self) -> tuple[tuple[object, str], ...]:
        if self.recipe is None:
            return ()
        attached = {
            name: getattr(self, name)
            for name in ("token_ratio", "token_tile_size", "keep_activations", "offload_activations", "waiting")
        }
        given = ", ".join(f"{name}={value!r}" for name, value in attached.items() if value)
        in_4bit = {"peft-kbit": True, "peft-8bit": False}.get(self.recipe, self.load_in_4bit)
        return (
            (
                self.method != "lora" or self.precision != "bf16" or self.load_in_4bit != in_4bit,
                (
                    f"recipe={self.recipe!r} is LoRA by PEFT. Set method='lora' and precision='bf16', with "
                    "load_in_4bit=True for peft-kbit, and without for peft-8bit"
                ),
            ),
            (
                given or self.weights == "host",
                (
                    f"recipe={self.recipe!r} is a script without slivertune, which has no "
                    f"{given or 'weights=' + repr(self.weights)}. Leave it out, or plan slivertune train without recipe"
                ),
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
                "quantised layers": None if self.waiting is None else f"--waiting {self.waiting}",
                "blocks on the host": "--weights host" if self.weights == "host" else None,
                "zero3": "ZeRO-3" if self.layout == "zero3" else None,
            }
        )
        if refusal is not None:
            return refusal
        if self.parks and self.method == "sft" and (clash := clash_of_parking(embeddings=self.train_embeddings)):
            return clash
        if self.load_in_4bit and self.method == "sft":
            return clash_of_4bit(self.layout, "each target with load_in_4bit")
        if self.method != "hift":
            return None
        if self.has_bf16_weights and (clash := clash_of_rounding(self.inactive, self.master_kind)) is not None:
            return clash
        if self.layout == "single":
            return None
        if self.gradients == "stepped" and self.gradient_accumulation_steps > 1:
            return STEPPED_ONCE
        optimizer_class, arguments = optimizer_of(self.optimizer)
        config = self.hift_config(master="fp32") if self.precision in ("fp32", "mixed") else self.hift_config()
        clash = clash_with_layout(self.layout, BaseOptimizer.of_class(optimizer_class, arguments, None), config)
        return f"{clash} (precision='mixed_hi')" if clash is not None and "master=" in clash else clash


def precision_in_16_bits(method: str, master: MasterKind | None) -> PrecisionName:
    """Return the precision of a run that stores its weights in 16 bits.

    Args:
        method: Name of the method.
        master: Its master weights, if they were chosen.
    """
    return "mixed_hi" if "master" in planned(method).settings and master in (None, "fp32") else "bf16"


def precision_with_bf16(method: str, master: MasterKind | None) -> PrecisionName:
    """Return the precision of a run with `--bf16`.

    Args:
        method: Name of the method.
        master: Its master weights, if they were chosen.
    """
    default = planned(method).bf16_precision
    return precision_in_16_bits(method, master) if default == "mixed_hi" else default


def rule_of(option: Option) -> NumberRule | None:
    """Find the rule of an option's numbers.

    Args:
        option: Option of a plan.

    Returns:
        The rule; None if the option takes no numbers.
    """
    default = COUNT if int in option.kinds else ANY if float in option.kinds else None
    return default and RULES.get(option.name, default)


def check_value(option: Option, value: Any) -> None:
    """Refuse a value that a field does not take, whatever the other fields are.

    Args:
        option: The field, as in `REQUEST_OPTIONS`.
        value: Value of the field; None is allowed if it is the default.

    Raises:
        ValueError: If it is refused. The message names the setting, its value and the rule.
    """
    name, kinds = option.name, option.kinds
    if value is None and option.default is None:
        return
    if name == "layers_per_group":
        check_layers_per_group(value)
        return
    if get_origin(kinds[0]) is Literal:
        check_choice(name, value, option.choices)
    elif int in kinds:
        check_integer(name, value)
    elif float in kinds:
        check_number(name, value)
    rule = rule_of(option)
    if rule is not None and not rule.allows(value):
        raise ValueError(f"{name}={value} must be {rule.describe()}")


REQUEST_OPTIONS = {option.name: option for option in options_of(PlanRequest)}
"""Fields of a request by name."""
_OF_HIFT = tuple(item.name for item in fields(HiFTConfig) if item.name in REQUEST_OPTIONS)
_OF_SFT = {
    item.name: name
    for item in fields(SFTConfig)
    if (name := NAMES_OF_OPTIONS.get(item.name, item.name)) in REQUEST_OPTIONS
}
