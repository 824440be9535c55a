"""The settings of `slivertune train --method sft`."""

from __future__ import annotations

from dataclasses import dataclass, field

from slivertune.sft.config import DEFAULT_LORA_RANK, SelectionCriterion, SFTConfig
from slivertune.training.options.defaults import EMBEDDED_DENSITY

_DEFAULTS = SFTConfig()
_ONLY_ESTIMATED = ("estimation_steps", "adam_beta1", "adam_beta2", "adam_epsilon")
"""Read with `--selection accumulated_gradient` alone."""
_ONLY_RESELECTED = ("estimation_steps", "replacement_rate", "redistribute")
"""Read where weights are reselected."""
_OTHER_OPTIMIZERS = ("optim", "optim_args", "optim_target_modules")
"""Arguments of the Trainer about optimizers that SFT takes the place of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTArguments:
    """SFT's settings, named as in `SFTConfig` where the name stands for itself; for `transformers.HfArgumentParser`.

    Raises:
        ValueError: If a number is out of its range or settings contradict each other.
    """

    density: float | None = field(
        default=_DEFAULTS.density,
        metadata={"help": "sft: share of each target tensor that is trained, in (0, 1]; at least one weight a tensor."},
    )
    num_weights: int | None = field(
        default=_DEFAULTS.num_weights,
        metadata={"help": "sft: weights trained in all targets together (d_phi in the paper), in place of --density."},
    )
    equivalent_lora_rank: int | None = field(
        default=_DEFAULTS.equivalent_lora_rank,
        metadata={
            "help": "sft: as many weights as LoRA of this rank would train on the same matrices, in place of "
            f"--density; {DEFAULT_LORA_RANK} if none of the three is given (the embedded model: "
            f"--density {EMBEDDED_DENSITY})."
        },
    )
    selection: SelectionCriterion = field(
        default=_DEFAULTS.selection,
        metadata={
            "help": "sft: how weights are grown: by the gradient accumulated over --estimation_steps updates, trained "
            "by AdamW; or by the row and column accumulators of SM3, which then trains them, in less memory."
        },
    )
    reselection_interval: int = field(
        default=20,
        metadata={"help": "sft: updates between two reselections (S); 0 keeps the first, random choice."},
    )
    estimation_steps: int = field(
        default=_DEFAULTS.estimation_steps,
        metadata={
            "help": "sft: updates of the estimation phase before each reselection (gamma); accumulated_gradient only."
        },
    )
    replacement_rate: float = field(
        default=_DEFAULTS.replacement_rate,
        metadata={
            "help": "sft: peak share of the weights that a reselection replaces (alpha), in [0, 1]; falls to 0 at the "
            "end of training."
        },
    )
    sft_target_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "sft: what is trained: ends of module paths, e.g. q_proj v_proj, or of parameter names; by default "
            "all linear layers of the blocks."
        },
    )
    train_embeddings: bool = field(
        default=_DEFAULTS.embeddings, metadata={"help": "sft: train the weights of all embeddings sparsely, too."}
    )
    redistribute: bool = field(
        default=_DEFAULTS.redistribute,
        metadata={
            "help": "sft: let a reselection move weights between tensors, to between a quarter and four times a "
            "tensor's share; not in the paper."
        },
    )
    packed: bool = field(
        default=_DEFAULTS.packed,
        metadata={"help": "sft: about halve the bytes of state; deltas and moments in bf16, rounded at random."},
    )
    sft_momentum: float = field(
        default=0.0, metadata={"help": "sft: SM3's momentum, in [0, 1); with --selection momentum alone."}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.sft_momentum < 1:
            raise ValueError(f"sft_momentum={self.sft_momentum} must lie in [0, 1); 0 has none")
        if self.reselection_interval < 0:
            raise ValueError(
                f"reselection_interval={self.reselection_interval} must be at least 1, or 0 to keep the first choice"
            )
        # Contradictions should show before a model is loaded.
        self.config(seed=0)

    def config(self, seed: int) -> SFTConfig:
        """The same settings as SFT takes them.

        Args:
            seed: The run's seed.

        Raises:
            ValueError: If the settings are out of range or contradict each other.
        """
        return SFTConfig(
            density=self.density,
            num_weights=self.num_weights,
            equivalent_lora_rank=self.equivalent_lora_rank,
            selection=self.selection,
            reselection_interval=self.reselection_interval or None,
            estimation_steps=self.estimation_steps,
            replacement_rate=self.replacement_rate,
            targets=self.sft_target_modules,
            embeddings=self.train_embeddings,
            redistribute=self.redistribute,
            packed=self.packed,
            seed=seed,
        )


def check_sft(arguments: SFTArguments, given: frozenset[str]) -> None:
    """Refuse what an SFT run would ignore.

    Args:
        arguments: SFT's settings.
        given: Names of the arguments that the user set.

    Raises:
        ValueError: If there is such an argument.
    """
    _refuse(
        given.intersection(_OTHER_OPTIMIZERS),
        "--method sft is an optimizer itself, AdamW or SM3 on the trained weights by --selection; leave it out",
    )
    if arguments.selection == "momentum":
        _refuse(
            given.intersection(_ONLY_ESTIMATED),
            "--selection momentum trains by SM3, which has no estimation phase and no moments of Adam; leave it out",
        )
    elif "sft_momentum" in given:
        _refuse({"sft_momentum"}, "it is SM3's, and read with --selection momentum alone; leave it out")
    if arguments.reselection_interval == 0:
        _refuse(
            given.intersection(_ONLY_RESELECTED),
            "--reselection_interval 0 keeps the first choice, so nothing is ever replaced; leave out one of the two",
        )


def _refuse(names: set[str] | frozenset[str], reason: str) -> None:
    if names:
        raise ValueError(f"{', '.join(f'--{name}' for name in sorted(names))}: {reason}")
