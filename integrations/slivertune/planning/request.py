"""What a plan is made for."""

from dataclasses import dataclass
from typing import Literal, get_args

from slivertune.core.layout import Layout
from slivertune.core.setting_checks import check_choice, check_integer
from slivertune.hift.base import BaseOptimizer
from slivertune.hift.config import MasterKind, StatePlace
from slivertune.hift.unsupported import clash_with_layout
from slivertune.planning.methods import clash_with_method, clash_with_zero3, planned, planned_methods
from slivertune.planning.optimizers import OptimizerName, optimizer_of
from slivertune.sft.config import SelectionCriterion
from slivertune.sft.unsupported import clash_of_4bit

PrecisionName = Literal["fp32", "mixed", "mixed_hi", "bf16"]
TaskName = Literal["causal_lm", "classification"]

_SHARDING_PARAMETERS: tuple[Layout, ...] = ("fsdp2", "zero3")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """A run, as far as it decides memory; the names are those of the command line.

    Raises:
        ValueError: If a value is outside what its field says, or two contradict each other.
    """

    method: str = "hift"
    """How the model is trained: one of `planned_methods()`."""
    optimizer: OptimizerName = "adamw"
    """Trains what the method trains. SFT is an optimizer itself, and takes "adamw" alone."""
    precision: PrecisionName = "fp32"
    """`fp32`: fp32 weights. `mixed`: fp32 weights under bf16 autocast. `mixed_hi`: bf16 weights with fp32 masters,
    which HiFT keeps (its paper's Mixed^Hi). `bf16`: bf16 weights and nothing behind them; LoRA's adapters and SFT's
    deltas stay fp32."""
    task: TaskName = "causal_lm"
    """Decides the model's head."""
    num_labels: int = 2
    """Classes of a classifier."""
    batch_size: int = 1
    """Sequences in a forward, on each GPU."""
    gradient_accumulation_steps: int = 1
    """Forwards and backwards before an update; from the second on, gradients of the first are alive all along."""
    seq_length: int = 512
    """Tokens in a sequence, none of them padding."""
    gradient_checkpointing: bool = False
    """Whether each block keeps its input alone and is computed again in the backward."""
    chunked_cross_entropy: bool = True
    """Whether a causal model's loss is computed in chunks, without all logits; a classifier has no need of it."""
    token_ratio: float | None = None
    """Share of the tokens that keep activations and gradients (TokenTune), in (0, 1]; None for all."""
    layers_per_group: int = 1
    """HiFT's m."""
    state: StatePlace = "host"
    """Where HiFT's state and masters wait."""
    master: MasterKind | None = None
    """The form of HiFT's masters of bf16 weights; None: "fp32" with `mixed_hi`, "none" with all else."""
    stream_bytes: int = 128 * 2**20
    """Bytes of HiFT's pieces on the device; 0 takes a whole group at once."""
    step_in_backward: bool = False
    """Whether HiFT steps a tensor as soon as its gradient is there."""
    density: float | None = None
    """SFT's share of trained weights, in (0, 1]; None: as many as LoRA of rank 64 has."""
    selection: SelectionCriterion = "accumulated_gradient"
    """How SFT grows weights."""
    reselection_interval: int = 20
    """Updates between two of SFT's reselections (S); 0 keeps the first choice, so that nothing is estimated."""
    estimation_steps: int = 5
    """Updates of AG's estimation phase before a reselection (gamma). With S < 2 gamma the first two phases overlap, and
    both phases' candidates are alive."""
    replacement_rate: float = 0.2
    """SFT's alpha, in [0, 1]: how many candidates more than that the second of two overlapping phases has."""
    lora_rank: int = 16
    """LoRA's r."""
    load_in_4bit: bool = False
    """Whether the blocks' linear layers are held in NF4; with LoRA or SFT."""
    layout: Layout = "single"
    """How the run is spread over GPUs."""
    num_gpus: int = 1
    """GPUs of the layout; all figures of a plan are those of one GPU, and `host_bytes` of its process."""
    offload_parameters: bool = False
    """Whether parameters wait on the host and are streamed layer by layer (FSDP2's CPU offload, ZeRO-3's
    offload_param)."""

    def __post_init__(self) -> None:
        check_choice("method", self.method, planned_methods())
        for name, choices in (
            ("optimizer", OptimizerName),
            ("precision", PrecisionName),
            ("task", TaskName),
            ("state", StatePlace),
            ("selection", SelectionCriterion),
            ("layout", Layout),
        ):
            check_choice(name, getattr(self, name), get_args(choices))
        if self.master is not None:
            check_choice("master", self.master, get_args(MasterKind))
        for name in (
            "num_labels",
            "batch_size",
            "gradient_accumulation_steps",
            "seq_length",
            "layers_per_group",
            "lora_rank",
            "num_gpus",
            "estimation_steps",
        ):
            check_integer(name, getattr(self, name), 1)
        check_integer("stream_bytes", self.stream_bytes, 0)
        check_integer("reselection_interval", self.reselection_interval, 0)
        for name in ("token_ratio", "density"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name}={value} must be in (0, 1]; leave it out for the default")
        if not 0 <= self.replacement_rate <= 1:
            raise ValueError(f"replacement_rate={self.replacement_rate} must be in [0, 1]; the paper uses 0.2")
        self._check_precision()
        self._check_method()
        self._check_layout()

    @property
    def master_kind(self) -> MasterKind:
        """What stands behind 16-bit weights."""
        if self.master is not None:
            return self.master
        return "fp32" if self.precision == "mixed_hi" else "none"

    @property
    def num_backwards(self) -> int:
        """Forwards and backwards to run of those of an update: the third is like the second."""
        return min(self.gradient_accumulation_steps, 2)

    @property
    def has_phases(self) -> bool:
        """Whether SFT has estimation phases."""
        return self.selection == "accumulated_gradient" and self.reselection_interval > 0

    @property
    def has_autocast(self) -> bool:
        """Whether operators compute in bf16 by autocast, as `slivertune train --bf16` has it for the method."""
        adapters_in_fp32 = self.precision == "bf16" and (self.method == "lora" or self.load_in_4bit)
        return self.precision == "mixed" or adapters_in_fp32

    def _check_precision(self) -> None:
        settings = planned(self.method).settings
        if self.precision == "mixed_hi" and "master" not in settings:
            raise ValueError(
                f"precision='mixed_hi' is HiFT's, and method={self.method!r} keeps no masters; take 'mixed' (fp32 "
                "weights under autocast) or 'bf16', or method='hift' with all layers in one group"
            )
        if self.precision == "mixed_hi" and self.master == "none":
            raise ValueError("precision='mixed_hi' means masters, and master='none' has none; take precision='bf16'")
        if self.precision != "mixed_hi" and self.master_kind != "none":
            raise ValueError(
                f"master={self.master!r} is for bf16 weights, which precision={self.precision!r} does not train "
                "on masters; take precision='mixed_hi'"
            )

    def _check_method(self) -> None:
        method = planned(self.method)
        if method.is_optimizer and self.optimizer != "adamw":
            raise ValueError(
                f"optimizer={self.optimizer!r} does not go with method={self.method!r}, which is an optimizer itself; "
                "leave it out"
            )
        if (
            "reselection_interval" in method.settings
            and self.has_phases
            and self.reselection_interval <= self.estimation_steps
        ):
            raise ValueError(
                f"reselection_interval={self.reselection_interval} must be greater than "
                f"estimation_steps={self.estimation_steps}, which are the last updates of each interval"
            )
        if self.load_in_4bit and (clash := clash_with_method(self.method)) is not None:
            raise ValueError(clash)
        if self.load_in_4bit and self.precision not in ("fp32", "bf16"):
            raise ValueError(f"load_in_4bit computes in precision 'bf16' or 'fp32', not {self.precision!r}")
        if self.state == "device" and self.master == "split":
            raise ValueError("master='split' halves what waits on the host; with state='device' take master='fp32'")
        if self.step_in_backward and "step_in_backward" not in method.settings:
            raise ValueError(f"step_in_backward is HiFT's; method={self.method!r} has none")
        if self.step_in_backward and self.gradient_accumulation_steps > 1:
            raise ValueError(
                f"step_in_backward steps a tensor at its first gradient, and gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} adds several up; leave out one of the two"
            )

    def _check_layout(self) -> None:
        if self.offload_parameters and self.layout not in _SHARDING_PARAMETERS:
            raise ValueError(
                f"offload_parameters streams parameters by FSDP2 or ZeRO-3; layout={self.layout!r} keeps them on the "
                "GPU: take layout='fsdp2' or 'zero3', also on one GPU"
            )
        if self.layout == "single" and self.num_gpus > 1:
            raise ValueError(
                f"num_gpus={self.num_gpus} with layout='single', which is one GPU; take 'ddp', 'fsdp2', 'zero1', "
                "'zero2' or 'zero3'"
            )
        if self.layout != "single" and self.num_gpus < 2 and not self.offload_parameters:
            raise ValueError(
                f"layout={self.layout!r} needs at least 2 GPUs, and num_gpus={self.num_gpus}; take layout='single'"
            )
        if (clash := self._clash_with_layout()) is not None:
            raise ValueError(clash)

    def _clash_with_layout(self) -> str | None:
        """What training would refuse, in its own words."""
        if self.load_in_4bit and self.layout == "zero3":
            return clash_with_zero3()
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
            step_in_backward=self.step_in_backward,
        )
        return f"{clash} (precision='mixed_hi')" if clash is not None and "master=" in clash else clash
