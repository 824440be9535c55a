"""Settings of SFT, and the options of its two update rules."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from slivertune.core.setting_checks import check_choice, check_flag, check_integer, check_number

SelectionCriterion = Literal["accumulated_gradient", "momentum"]
Form = Literal["auto", "optimizer", "layer"]
PhiGradient = Literal["chunked", "sampled"]

DEFAULT_LORA_RANK = 64
"""LoRA rank that sets the number of weights if no setting does, the paper's best (appendix A)."""

NAMES_OF_OPTIONS = {"targets": "sft_target_modules", "embeddings": "train_embeddings"}
"""Options of a command by the fields of `SFTConfig`, where the two differ."""

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
SM3_EPS = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig:
    """Settings of SFT (arXiv 2401.16405), with the paper's symbols in parentheses.

    At most one of `density`, `num_weights` and `equivalent_lora_rank` sets the number of trained weights. The share is
    the same in every tensor.

    Raises:
        ValueError: If a value is out of its field's range, or two settings contradict each other.

    Example:
        >>> config = SFTConfig(equivalent_lora_rank=16, targets=["q_proj", "v_proj"])
        >>> optimizer = SFT(model, config=config, lr=1e-4, total_steps=1000)
    """

    density: float | None = None
    """Trained share of each target tensor, in (0, 1]. At least one weight per tensor trains."""
    num_weights: int | None = None
    """Weights trained in all targets together (d_phi in the paper), in place of `density`."""
    equivalent_lora_rank: int | None = None
    """Rank of a LoRA on the same matrices that has as many weights as are to train, in place of `density`. It is 64 if
    none of the three is given.

    These are rank x (in + out) per matrix, and per expert's matrix."""
    selection: SelectionCriterion = "accumulated_gradient"
    """Criterion for growing weights. accumulated_gradient (AG): the gradient accumulated over `estimation_steps`
    updates, with AdamW. momentum (MA): the row and column accumulators of SM3, with SM3, which needs less memory."""
    reselection_interval: int = 20
    """Updates between two reselections (S). 0 keeps the first, random choice for the whole run."""
    estimation_steps: int = 5
    """Updates of AG's estimation phase before each reselection (gamma).

    The first reselection ends the first phase."""
    replacement_rate: float = 0.2
    """Peak share of the weights that a reselection after the first replaces (alpha), in [0, 1]. It falls to 0 over the
    run."""
    targets: Sequence[str | type] | None = None
    """Ends of the paths of trained modules, e.g. q_proj v_proj, or of parameter names. By default all linear layers of
    the blocks.

    Module classes may be targets, too. None takes the weights of all linear layers and experts of the blocks that
    require gradients."""
    embeddings: bool = False
    """Whether the weights of all embeddings train sparsely, too."""
    form: Form = "auto"
    """Storage of the deltas. `optimizer` adds them to the dense weights. `layer` stores them beside frozen weights, and
    the layer adds them. `auto` takes `layer` only for 4-bit weights."""
    phi_gradient: PhiGradient = "chunked"
    """Method for the deltas' gradient in the layer form. `chunked`: dense products of 1,024 rows at a time, as exact as
    the optimizer form. `sampled`: `torch.sparse.sampled_addmm`, for fp32 on a CPU. It is faster at low density, with
    sums in another order (relative differences of 1e-6)."""
    redistribute: bool = False
    """Whether a reselection may move weights between tensors, within 1/4 to 4 times a tensor's share. It is not in the
    paper."""
    packed: bool = False
    """Deltas and moments in bf16, rounded stochastically: about half the bytes of state.

    Positions take 16 bits, ages 1 byte. For bf16 weights AG takes 11 bytes (23 in an estimation phase) and MA 6,
    instead of 20 (36) and 10."""
    max_grad_norm: float | None = None
    """Largest norm of the gradient of all trained weights together. `step` scales larger gradients down. None leaves
    clipping to the training loop."""
    seed: int = 0
    """Seed of the first choice, and of the rounding if `packed`. It must be the same on all ranks."""

    def __post_init__(self) -> None:
        check_choice("selection", self.selection, get_args(SelectionCriterion))
        check_choice("form", self.form, get_args(Form))
        check_choice("phi_gradient", self.phi_gradient, get_args(PhiGradient))
        check_integer("estimation_steps", self.estimation_steps, 1)
        check_integer("seed", self.seed)
        check_integer("reselection_interval", self.reselection_interval, 0)
        for name in ("embeddings", "redistribute", "packed"):
            check_flag(name, getattr(self, name))
        for name in ("num_weights", "equivalent_lora_rank"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_number("replacement_rate", self.replacement_rate)
        for name in ("replacement_rate", "density", "max_grad_norm"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
                # A number of numpy can't be saved beside the deltas.
                object.__setattr__(self, name, float(getattr(self, name)))
        given: Any = self.targets
        if given is not None and not isinstance(given, Sequence):
            object.__setattr__(self, "targets", tuple(given))  # a generator can be read only once
        for is_broken, text in self._rules():
            if is_broken:
                raise ValueError(text)
        targets: Sequence[object] = self.targets or ()
        for target in targets:
            if not isinstance(target, str) and not _is_module_class(target):
                raise ValueError(f"targets has {target!r}. Give names and classes of modules")

    def _rules(self) -> tuple[tuple[bool, str], ...]:
        """Return the rules for settings, each as whether it is broken and the error's text."""
        given = [name for name in ("density", "num_weights", "equivalent_lora_rank") if getattr(self, name) is not None]
        ends_before = 0 < self.reselection_interval <= self.estimation_steps
        return (
            (len(given) > 1, f"{' and '.join(given)} set the same thing, the number of trained weights. Give one"),
            (
                self.density is not None and not 0 < self.density <= 1,
                f"density={self.density} must be in (0, 1]. The paper trains 0.003 to 0.023 of a model",
            ),
            (
                not 0 <= self.replacement_rate <= 1,
                f"replacement_rate={self.replacement_rate} must be in [0, 1]. The paper uses 0.2",
            ),
            (
                self.max_grad_norm is not None and not self.max_grad_norm > 0,
                f"max_grad_norm={self.max_grad_norm} must be positive, or None for no clipping",
            ),
            (
                isinstance(self.targets, str),
                f"targets is the string {self.targets!r}. Write a list of names, [{self.targets!r}]",
            ),
            (
                self.targets is not None and not self.targets,
                "targets is empty. Name modules, parameters or classes, or leave it None for all blocks",
            ),
            (
                self.selection == "accumulated_gradient" and ends_before,
                (
                    f"reselection_interval={self.reselection_interval} must be greater than "
                    f"estimation_steps={self.estimation_steps}, the last updates of each interval. Raise it, "
                    'lower estimation_steps, or use selection="momentum", which has no estimation phase'
                ),
            ),
        )


def _is_module_class(target: object) -> bool:
    if not isinstance(target, type):
        return False
    from torch import nn

    return issubclass(target, nn.Module)


def checked_options(
    config: SFTConfig,
    lr: float,
    betas: tuple[float, float] | None,
    eps: float | None,
    weight_decay: float,
    momentum: float,
) -> dict[str, Any]:
    """Check the optimizer's options, and fill in the defaults of the update rule.

    Args:
        config: Settings; `selection` chooses the rule, AdamW for AG and SM3 for MA.
        lr: Learning rate.
        betas: AdamW's decay rates, or None.
        eps: Term added to the denominator, or None.
        weight_decay: Weight decay of the deltas.
        momentum: SM3's momentum.

    Returns:
        Options of the param group.

    Raises:
        ValueError: If an option is out of range, or belongs to the other rule.
    """
    by_sm3 = config.selection == "momentum"
    numbers: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    for name, value in (numbers if eps is None else numbers | {"eps": eps}).items():
        if not (name == "lr" and hasattr(value, "item")):  # the rate may be a tensor
            check_number(name, value)
    pair: Any = betas
    if pair is not None and not (isinstance(pair, Sequence) and len(pair) == 2):
        raise ValueError(f"betas={betas!r} must be two numbers, such as (0.9, 0.999)")
    rules = (
        (0 <= float(lr) < math.inf, f"lr={lr} must be a finite number of at least 0"),
        (0 <= weight_decay < math.inf, f"weight_decay={weight_decay} must be a finite number of at least 0"),
        (eps is None or 0 <= eps < math.inf, f"eps={eps} must be a finite number of at least 0"),
        (0 <= momentum < 1, f"momentum={momentum} must be in [0, 1)"),
        (
            not (by_sm3 and betas is not None),
            f'betas={betas} are for AdamW, and selection="momentum" trains by SM3. Use momentum= instead',
        ),
        (
            by_sm3 or not momentum,
            f'momentum={momentum} is for SM3, and selection="accumulated_gradient" trains by AdamW. Use betas= instead',
        ),
        (all(0 <= beta < 1 for beta in betas or ()), f"betas={betas} must be in [0, 1)"),
    )
    for is_kept, text in rules:
        if not is_kept:
            raise ValueError(text)
    if by_sm3:
        return {
            "lr": lr,
            "eps": SM3_EPS if eps is None else eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
        }
    first, second = ADAM_BETAS if betas is None else betas
    return {"lr": lr, "betas": (first, second), "eps": ADAM_EPS if eps is None else eps, "weight_decay": weight_decay}
