"""`--method hift`: trains one group of layers per update."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, TrainerState, TrainingArguments

from slivertune.core.device_memory import usable_bytes
from slivertune.core.host_memory import available_host_bytes
from slivertune.core.layers import layers_in
from slivertune.core.refused_pairs import refuse_together
from slivertune.core.setting_checks import layers_or_auto
from slivertune.hift import keep_blocks_on_host, quantize_layers
from slivertune.hift.block_codes import WaitingForm
from slivertune.hift.config import GradientPlace, HiFTConfig, MasterKind, Order, StatePlace, WeightPlace
from slivertune.interop.methods import check_base_optimizer
from slivertune.planning.cards import Card, find_card, known_cards
from slivertune.planning.hift_run import NAMED_ALIKE
from slivertune.planning.layers_per_group import choose_layers_per_group
from slivertune.planning.plan import Limits
from slivertune.planning.request import PlanRequest
from slivertune.training.embedded.built_in import REFERENCE
from slivertune.training.methods.method import FEWEST_UPDATES_A_LINE, SliverMethod
from slivertune.training.models import LoadedModel
from slivertune.training.tasks.task import Task

RATE_HINT = (
    "HiFT trains each parameter in one of {groups} updates here. --learning_rate was not given, so {rate:g} is used. "
    "Start the search at the rate of dense fine-tuning, and try {others} of it"
)
EMBEDDED_LAYERS_PER_GROUP = 4
"""Layers per group on the embedded model, which has eight layers."""
SCHEDULE = ("layers_per_group", "steps_per_group", "order")
"""Settings that decide which group each update trains."""

_DEFAULTS = HiFTConfig()
# By layers_per_group, on the language reference: the best learning rate with one update per turn (from
# benchmarks/results/dial.json) and with 20 (from quality.json; not measured for 8), and the number of updates, a
# multiple of 8, that takes as much CPU time as 480 updates of one layer. Dates are trained at the same rates.
_EMBEDDED_RATES = {1: 2e-3, 2: 1e-3, 4: 1e-3, 8: 2e-3}
_EMBEDDED_RATES_OF_LONG_TURNS = {1: 8e-3, 2: 4e-3, 4: 2e-3, 8: 2e-3}
_EMBEDDED_STEPS = {1: 480, 2: 432, 4: 352, 8: 264}


@dataclass(frozen=True, kw_only=True, slots=True)
class HiFTArguments:
    """Settings of HiFT, named as in `HiFTConfig`; a dataclass for `transformers.HfArgumentParser`.

    Raises:
        ValueError: If the settings are out of range or contradict each other.
    """

    preset: Literal["paper"] | None = field(
        default=None,
        metadata={
            "help": "hift: paper sets the paper's schedule (--layers_per_group 1 --steps_per_group 1 --order "
            "bottom2up), except for what is given as well."
        },
    )
    layers_per_group: str = field(
        default=str(_DEFAULTS.layers_per_group),
        metadata={
            "metavar": "N|SHARE|auto",
            "help": "hift: layers per group, trained in one update (m in the paper): a number, or a share of the "
            "layers; auto (one GPU): the largest number that fits and whose transfers fully overlap with compute, "
            "found by planning the run.",
        },
    )
    gpu: str | None = field(
        default=None,
        metadata={
            "metavar": "NAME",
            "help": f"hift: GPU for which --layers_per_group auto chooses, one of {', '.join(known_cards())}; by "
            "default this machine's.",
        },
    )
    layers: list[str] | None = field(
        default=None,
        metadata={
            "help": "hift: layers from bottom to top, for models in which they are not found: for each a module "
            "path or a parameter name, or several joined by plus signs; blocks.* is one layer per block. Together "
            "they must name every parameter.",
        },
    )
    steps_per_group: int = field(
        default=_DEFAULTS.steps_per_group, metadata={"help": "hift: updates per turn of a group."}
    )
    order: Order = field(
        default=_DEFAULTS.order, metadata={"help": "hift: order of the groups; random is shuffled once, by --seed."}
    )
    state: StatePlace = field(
        default=_DEFAULTS.state,
        metadata={"help": "hift: storage of state and fp32 masters between turns; discard deletes them after a turn."},
    )
    state_dir: str | None = field(
        default=None, metadata={"metavar": "FOLDER", "help": "hift: folder of the files of --state disk."}
    )
    state_ram_bytes: int = field(
        default=_DEFAULTS.state_ram_bytes,
        metadata={"help": "hift: with --state disk, bytes of host memory for resident groups, as many as fit."},
    )
    master: MasterKind = field(
        default=_DEFAULTS.master,
        metadata={"help": "hift: master weights of 16-bit weights, an fp32 copy or none."},
    )
    stream_bytes: int = field(
        default=_DEFAULTS.stream_bytes,
        metadata={"help": "hift: chunk size in bytes for a step of a group on the device; 0: the whole group."},
    )

    gradients: GradientPlace = field(
        default=_DEFAULTS.gradients,
        metadata={
            "help": "hift: storage of gradients until their step. device; host: offload each at once, so that GPU "
            "memory does not grow with --layers_per_group; stepped: none, step each tensor inside the backward, "
            "with --max_grad_norm 0. host and stepped exclude --fp16."
        },
    )
    waiting: WaitingForm | None = field(
        default=None,
        metadata={
            "help": "hift: on the GPU, store the blocks' idle linear weights in fewer bits, int8 or nf4. Exact "
            "weights are offloaded to host memory, and saved. Evaluation runs on the weights on the GPU."
        },
    )
    prefetch_bytes: str = field(
        default="auto",
        metadata={
            "metavar": "N|auto",
            "help": "hift: GPU memory in bytes that may hold prefetched optimizer state, so that copies overlap "
            "with compute; auto: the memory that the first cycle left unused.",
        },
    )
    weights: WeightPlace = field(
        default=_DEFAULTS.weights,
        metadata={
            "help": "hift: storage of blocks that neither run nor train. device; host: offload them to host memory "
            "and prefetch each before its use, in fewer bits with --waiting; on one device or by DDP."
        },
    )
    resident_bytes: str = field(
        default="auto",
        metadata={
            "metavar": "N|auto",
            "help": "hift: with --weights host, bytes of blocks that stay resident on the GPU; auto: the memory "
            "that the first cycle left unused.",
        },
    )

    def __post_init__(self) -> None:
        # Contradictions must raise before a model is loaded.
        self.config(seed=0)

    @property
    def num_layers(self) -> float | None:
        """`layers_per_group` as a number or a share; None if it is `auto` and not chosen yet."""
        number = layers_or_auto(self.layers_per_group)
        return None if number == "auto" else number

    def config(self, seed: int) -> HiFTConfig:
        """Return the settings as a `HiFTConfig`, with one layer per group until the number is chosen.

        Args:
            seed: Seed of the run.
        """
        given: dict[str, Any] = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("gpu", "preset")
        }
        given["layers_per_group"] = 1 if self.num_layers is None else self.num_layers
        for name in ("prefetch_bytes", "resident_bytes"):
            if given[name].isdecimal():
                given[name] = int(given[name])
        return HiFTConfig(**{**given, "layers": layers_in(self.layers)}, seed=seed)


class HiFTMethod(SliverMethod):
    """HiFT around the Trainer's optimizer."""

    name = "hift"
    help = "one group of layers per update, the rest frozen"
    options_class = HiFTArguments
    kept_settings = SCHEDULE
    bf16_use = "weights"
    is_planned_on_ranks = True
    options: HiFTArguments

    @classmethod
    def preset_values(cls, typed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schedule of `--preset paper`."""
        if typed.get("preset") is None:
            return {}
        paper = HiFTConfig.paper()
        return {name: getattr(paper, name) for name in SCHEDULE} | {"layers_per_group": str(paper.layers_per_group)}

    @classmethod
    def embedded_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the layers per group and their best rate; on the language reference, a length of equal CPU time."""
        layers_per_group = given.get("layers_per_group", str(EMBEDDED_LAYERS_PER_GROUP))
        # For a share and `auto`, take the rate of the default. Other words are refused elsewhere.
        number = int(layers_per_group) if layers_per_group.isdecimal() else EMBEDDED_LAYERS_PER_GROUP
        measured = max((each for each in _EMBEDDED_RATES if each <= number), default=1)
        is_long = int(given.get("steps_per_group", _DEFAULTS.steps_per_group)) >= _DEFAULTS.steps_per_group
        rates = _EMBEDDED_RATES_OF_LONG_TURNS if is_long else _EMBEDDED_RATES
        defaults: dict[str, Any] = {"layers_per_group": layers_per_group, "learning_rate": rates[measured]}
        if is_long:
            defaults["warmup_steps"] = 0  # a warm-up would be shorter than a cycle, which holds one rate
        return {**defaults, "max_steps": _EMBEDDED_STEPS[measured]} if given.get("dataset") == [REFERENCE] else defaults

    def check(self, given: frozenset[str], training: TrainingArguments) -> None:
        """Refuse optimizers that can't be rotated, and settings that exclude each other."""
        check_base_optimizer(training)
        self._check_choice(training)
        refuse_together(
            {
                "waiting": None if self.options.waiting is None else f"--waiting {self.options.waiting}",
                "weights='host'": "--weights host" if self.options.weights == "host" else None,
                "torch.compile": "--torch_compile" if training.torch_compile else None,
            }
        )
        if self.options.gradients == "device":
            return
        for is_asked, name, reason, way_out in (
            (
                training.max_grad_norm > 0 and self.options.gradients == "stepped",
                f"--max_grad_norm {training.max_grad_norm:g}",
                "the norm of all gradients is known only when they are gone",
                "Give --max_grad_norm 0 or --gradients host",
            ),
            (training.fp16, "--fp16", "gradients are unscaled after the backward, on the device", "Use --bf16"),
        ):
            if is_asked:
                raise ValueError(
                    f"--gradients {self.options.gradients} does not go with {name}: {reason}. {way_out}, or leave "
                    "out --gradients"
                )

    def _check_choice(self, training: TrainingArguments) -> None:
        options = self.options
        if options.num_layers is not None:
            if options.gpu is not None:
                raise ValueError(f"--gpu {options.gpu} takes effect only with --layers_per_group auto. Leave it out")
            return
        if training.world_size > 1:
            raise ValueError(
                f"--layers_per_group auto chooses for one GPU, and this run has {training.world_size} processes. "
                "Give a number"
            )
        try:
            find_card(options.gpu)
        except ValueError as error:
            raise ValueError(f"--layers_per_group auto: {error}") from None

    def adapt(self, loaded: LoadedModel, task: Task) -> Any:
        """Quantise idle layers and offload blocks to host memory before the Trainer moves the model to the GPU."""
        if self.options.waiting is not None:
            quantize_layers(loaded.model, self.options.waiting)
        if self.options.weights == "host":
            keep_blocks_on_host(loaded.model)
        return loaded.model

    def follow(self, facts: Mapping[str, Any], given: frozenset[str]) -> None:
        """Copy the schedule of the first run, except for what was typed now: its defaults may have been others."""
        saved = facts.get("hift", {})
        is_auto = self.options.num_layers is None
        asked = given - {"layers_per_group"} if is_auto else given
        followed = {name: saved[name] for name in SCHEDULE if saved.get(name) is not None and name not in asked}
        if "layers_per_group" in followed:
            followed |= {"layers_per_group": str(followed["layers_per_group"]), "gpu": None}
        self.options = replace(self.options, **followed)

    def settle(self, request: Callable[[], PlanRequest], config: PreTrainedConfig, say: Callable[[str], None]) -> None:
        """Choose the number of layers per group, if it is `auto`."""
        options = self.options
        if options.num_layers is not None:
            return
        card = find_card(options.gpu)
        say(f"choosing layers_per_group for a {card.name}: planning the run with fewer and fewer layers")
        try:
            # A plan builds models, whose initial weights must not advance the run's random state.
            with torch.random.fork_rng(devices=[]):
                choice = choose_layers_per_group(
                    request(),
                    config,
                    card,
                    Limits(device_bytes=_usable_bytes(card, options.gpu), host_bytes=available_host_bytes()),
                    prefetch_bytes=None if options.prefetch_bytes == "auto" else int(options.prefetch_bytes),
                    tell=say,
                )
        except ValueError as error:
            raise ValueError(f"--layers_per_group auto: {error}") from error
        self.options = replace(options, layers_per_group=str(choice.chosen.layers_per_group), gpu=None)
        say(choice.lines()[0])

    @property
    def steps_in_backward(self) -> bool:
        """Whether updates are made inside the backward, by `--gradients stepped`."""
        return self.options.gradients == "stepped"

    def facts(self) -> dict[str, Any]:
        """Return the settings that decide which group each update trains."""
        options = self.options
        return {
            "hift": {
                "layers_per_group": options.num_layers,
                "steps_per_group": options.steps_per_group,
                "order": options.order,
            },
            "layers": options.layers,
        }

    def plan_settings(self, precision: str) -> dict[str, Any]:
        """Return the settings that decide memory; bf16 weights have fp32 master weights unless `--master none`."""
        settings = {name: getattr(self.options, name) for name in NAMED_ALIKE}
        settings["layers_per_group"] = self.options.num_layers or 1
        settings["layers"] = None if self.options.layers is None else tuple(self.options.layers)
        for name in ("prefetch_bytes", "resident_bytes"):
            settings[name] = 0 if settings[name] == "auto" else int(settings[name])
        if precision == "bf16" and self.options.master != "none":
            settings |= {"precision": "mixed_hi", "master": self.options.master}
        return settings

    def cycle(self, state: TrainerState) -> tuple[int, str]:
        """Count the lines of the memory ledger: whole cycles of all groups, labelled by the number of the last."""
        num_updates = self._whole_cycles()
        num_done = self.optimizer.rotation.steps // num_updates
        return num_done, f"cycle {num_done * num_updates // self.optimizer.cycle_length:>4}"

    def logging_steps(self) -> int:
        """Return the updates of a line: a long turn, or whole cycles and a turn, so that it ends on the next group."""
        turn = int(self.optimizer.config.steps_per_group)
        if turn >= FEWEST_UPDATES_A_LINE:
            return turn
        return self._whole_cycles() + (turn if self.optimizer.num_groups > 1 else 0)

    def _whole_cycles(self) -> int:
        """Return the updates in the whole cycles of a line."""
        cycle_length = int(self.optimizer.cycle_length)
        return math.ceil(FEWEST_UPDATES_A_LINE / cycle_length) * cycle_length

    def lines(self) -> list[str]:
        """Describe the groups and their order."""
        hift = self.optimizer
        num_layers = sum(len(group.layers) for group in hift.groups)
        turns = f"{hift.cycle_length} updates per cycle"
        lines = [f"  groups  {hift.num_groups} groups, {num_layers} layers in all, {hift.config.order}; {turns}"]
        if hift.config.waiting is not None:
            lines.append(f"  layers  idle ones in {hift.config.waiting}, also in evaluation; saved weights are exact")
        return lines

    def notes(self, model: torch.nn.Module, *, learning_rate: float | None) -> list[str]:
        """Warn of a default learning rate that is meant for dense fine-tuning."""
        if learning_rate is None or self.optimizer.num_groups == 1:
            return []
        others = "half and twice" if self.optimizer.config.steps_per_group == 1 else "twice and four times"
        return [RATE_HINT.format(groups=self.optimizer.num_groups, rate=learning_rate, others=others)]

    def settings(self) -> dict[str, Any]:
        """Return HiFT's settings and the number of groups; `weights`, a dtype in results, becomes `weights_place`."""
        given = asdict(self.options)
        given["weights_place"] = given.pop("weights")
        return {**given, "layers_per_group": self.options.num_layers, "num_groups": self.optimizer.num_groups}


def _usable_bytes(card: Card, asked: str | None) -> int:
    """Return the memory of a named card in bytes; for the card here, the memory that other processes leave free."""
    if asked is not None:
        return card.memory_bytes
    return usable_bytes()
