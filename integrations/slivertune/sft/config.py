"""What a user can choose about SFT: its settings, and the options of the two update rules."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from slivertune.core.setting_checks import check_choice, check_integer

SelectionCriterion = Literal["accumulated_gradient", "momentum"]
Form = Literal["auto", "optimizer", "layer"]
PhiGradient = Literal["chunked", "sampled"]

DEFAULT_LORA_RANK = 64
"""The paper's best setting (appendix A); taken if the number of weights is not given in any way."""

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
SM3_EPS = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig:
    """Settings of SFT; the paper's symbols in parentheses.

    How many weights are trained is said in at most one way: `density`, `num_weights` or `equivalent_lora_rank`. The
    share is the same in every tensor.

    Raises:
        ValueError: If a value is outside what its field says.
    """

    density: float | None = None
    """Share of each target tensor that is trained, in (0, 1]; at least one weight a tensor."""
    num_weights: int | None = None
    """Weights trained in all targets together (d_phi)."""
    equivalent_lora_rank: int | None = None
    """As many weights as LoRA of this rank would train on the same matrices: rank x (in + out) for each of them, and
    for each expert's. 64 if nothing is said."""
    selection: SelectionCriterion = "accumulated_gradient"
    """How weights are grown: by the gradient accumulated over `estimation_steps` updates, trained by AdamW (AG), or by
    the row and column accumulators of the SM3 optimizer that trains them (MA), which takes less memory."""
    reselection_interval: int | None = 20
    """Updates between two reselections (S). None keeps the first, random choice for the whole run."""
    estimation_steps: int = 5
    """Updates of AG's estimation phase before each reselection (gamma); the first reselection ends the first."""
    replacement_rate: float = 0.2
    """Peak share of the weights that a reselection replaces (alpha), in [0, 1]; falls to 0 at the end of training."""
    targets: Sequence[str | type[nn.Module]] | None = None
    """What is trained: ends of module paths ("q_proj"), ends of parameter names ("q_proj.bias"), module classes. None
    takes the weights of all linear layers and experts of the blocks that require gradients."""
    embeddings: bool = False
    """Whether the weights of all `nn.Embedding` modules are targets, too."""
    form: Form = "auto"
    """Where the deltas live: in the dense weights, kept by the optimizer (`optimizer`), or beside frozen weights, added
    by the layer (`layer`). `auto` takes the layer form for 4-bit weights alone."""
    phi_gradient: PhiGradient = "chunked"
    """How the layer form computes the gradient of its deltas: by dense products of 1,024 rows at a time, as exact as
    the optimizer form; or by `torch.sparse.sampled_addmm` on fp32 on a CPU, faster at low density, with sums in another
    order (relative differences of 1e-6)."""
    redistribute: bool = False
    """Whether a reselection may move weights between tensors, to between a quarter and four times a tensor's share.
    Not in the paper."""
    packed: bool = False
    """Whether what is kept for a weight is halved: 16-bit positions, bf16 deltas and moments that are rounded at
    random, one byte of age. For bf16 weights 11 bytes with AG (23 in an estimation phase) and 6 with MA, in place of 20
    (36) and 10."""
    max_grad_norm: float | None = None
    """Largest norm of the gradient of all trained weights together; larger gradients are scaled down in `step`. None
    leaves clipping to the training loop."""
    seed: int = 0
    """Seed of the first choice; must be the same on all ranks."""

    def __post_init__(self) -> None:
        self._check_amount()
        check_choice("selection", self.selection, get_args(SelectionCriterion))
        check_choice("form", self.form, get_args(Form))
        check_choice("phi_gradient", self.phi_gradient, get_args(PhiGradient))
        check_integer("estimation_steps", self.estimation_steps, 1)
        if not 0 <= self.replacement_rate <= 1:
            raise ValueError(f"replacement_rate={self.replacement_rate} must be in [0, 1]; the paper uses 0.2")
        check_integer("seed", self.seed)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm} must be positive; None does not clip")
        self._check_targets()
        self._check_interval()

    def _check_amount(self) -> None:
        given = [name for name in ("density", "num_weights", "equivalent_lora_rank") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} say the same thing, how many weights are trained; give one")
        if self.density is not None and not (0 < self.density <= 1 and math.isfinite(self.density)):
            raise ValueError(f"density={self.density} must be in (0, 1]; the paper trains 0.003 to 0.023 of a model")
        for name in ("num_weights", "equivalent_lora_rank"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)

    def _check_targets(self) -> None:
        if isinstance(self.targets, str):
            raise ValueError(f"targets is the string {self.targets!r}; write a list of names, [{self.targets!r}]")
        if self.targets is not None and not self.targets:
            raise ValueError("targets is empty; name modules, parameters or classes, or leave it None for all blocks")
        for target in self.targets or ():
            if not _names_modules(target):
                raise ValueError(f"targets has {target!r}; it takes names and classes of modules")

    def _check_interval(self) -> None:
        if self.reselection_interval is None:
            return
        check_integer("reselection_interval", self.reselection_interval, 1)
        if self.selection == "accumulated_gradient" and self.reselection_interval <= self.estimation_steps:
            raise ValueError(
                f"reselection_interval={self.reselection_interval} must be greater than "
                f"estimation_steps={self.estimation_steps}, which are the last updates of each interval; raise the one "
                'or lower the other, or use selection="momentum", which has no estimation phase'
            )


def _names_modules(target: object) -> bool:
    return isinstance(target, str) or (isinstance(target, type) and issubclass(target, nn.Module))


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
        config: Its `selection` decides on the rule: AdamW for AG, SM3 for MA.
        lr: Learning rate.
        betas: AdamW's decay rates, or None.
        eps: Added to the denominator, or None.
        weight_decay: Decay of the deltas.
        momentum: SM3's momentum.

    Returns:
        The options of the param group.

    Raises:
        ValueError: If one is out of range, or belongs to the other rule.
    """
    if not (float(lr) >= 0 and math.isfinite(float(lr))):
        raise ValueError(f"lr={lr} must be a finite number of at least 0")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay={weight_decay} must be at least 0")
    if eps is not None and not eps >= 0:
        raise ValueError(f"eps={eps} must be at least 0")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} must be in [0, 1)")
    if config.selection == "momentum":
        if betas is not None:
            raise ValueError(f'betas={betas} are AdamW\'s; selection="momentum" trains by SM3, which takes momentum=')
        return {
            "lr": lr,
            "eps": SM3_EPS if eps is None else eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
        }
    if momentum:
        raise ValueError(
            f'momentum={momentum} is SM3\'s; selection="accumulated_gradient" trains by AdamW, with betas='
        )
    first, second = ADAM_BETAS if betas is None else betas
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError(f"betas={betas} must be in [0, 1)")
    return {"lr": lr, "betas": (first, second), "eps": ADAM_EPS if eps is None else eps, "weight_decay": weight_decay}
