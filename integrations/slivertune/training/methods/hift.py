"""`--method hift`: trains one group of layers per update."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, TrainerState, TrainingArguments

from slivertune.core.device_memory import usable_bytes
from slivertune.core.host_memory import available_host_bytes
from slivertune.hift.config import HiFTConfig
from slivertune.hift.early_parking import park_for_hift
from slivertune.interop.methods import check_base_optimizer, check_hift_settings
from slivertune.planning.cards import Card, find_card
from slivertune.planning.layers_per_group import choose_layers_per_group
from slivertune.planning.plan import Limits
from slivertune.planning.request import PlanRequest
from slivertune.training.embedded.built_in import REFERENCE
from slivertune.training.methods.method import FEWEST_UPDATES_A_LINE, SliverMethod
from slivertune.training.models import LoadedModel
from slivertune.training.options.arguments import ParkedArguments
from slivertune.training.options.methods import HIFT, HiFTOptions
from slivertune.training.tasks.task import Task

RATE_HINT = (
    "HiFT trains each parameter in one of {groups} updates here. --learning_rate was not given, so {rate:g} is used. "
    "Start the search at the rate of dense fine-tuning, and try {others} of it"
)
EMBEDDED_LAYERS_PER_GROUP = 4
"""Layers per group on the embedded model, which has eight layers. See docs/evidence.md, "Reasons for the defaults"."""
SCHEDULE = ("layers_per_group", "steps_per_group", "order")
"""Settings that decide which group each update trains."""

_DEFAULTS = HiFTConfig()
# By layers_per_group, on the language reference: the best learning rate with one update per turn (from
# benchmarks/results/dial.json) and with 20 (from quality.json; not measured for 8), and the number of updates, a
# multiple of 8, that takes as much CPU time as 480 updates of one layer. Dates are trained at the same rates.
_EMBEDDED_RATES = {1: 2e-3, 2: 1e-3, 4: 1e-3, 8: 2e-3}
_EMBEDDED_RATES_OF_LONG_TURNS = {1: 8e-3, 2: 4e-3, 4: 2e-3, 8: 2e-3}
_EMBEDDED_STEPS = {1: 480, 2: 432, 4: 352, 8: 264}


class HiFTMethod(SliverMethod):
    """HiFT around the Trainer's optimizer."""

    about = HIFT
    kept_settings = SCHEDULE
    bf16_use = "weights"
    parks = True
    is_planned_on_ranks = True
    options: HiFTOptions

    @classmethod
    def preset_values(cls, typed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schedule of `--preset paper`."""
        if typed.get("preset") is None:
            return {}
        paper = HiFTConfig.paper()
        return {name: getattr(paper, name) for name in SCHEDULE}

    @classmethod
    def embedded_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the layers per group and their best rate.

        On the language reference, also return a length of equal CPU time.
        """
        layers_per_group = given.get("layers_per_group", EMBEDDED_LAYERS_PER_GROUP)
        # For a share and `auto`, take the rate of the default.
        number = layers_per_group if isinstance(layers_per_group, int) else EMBEDDED_LAYERS_PER_GROUP
        number = max(_EMBEDDED_RATES) if layers_per_group == "all" else number
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
        check_hift_settings(self.options, training, "--{} {}".format)

    def _check_choice(self, training: TrainingArguments) -> None:
        options = self.options
        if options.layers_per_group != "auto":
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

    def park(self, model: torch.nn.Module, parked: ParkedArguments) -> None:
        """Do nothing: HiFT parks its idle layers by its own settings."""

    def adapt(self, loaded: LoadedModel, task: Task) -> Any:
        """Quantise idle layers and offload blocks to host memory before the Trainer moves the model to the GPU."""
        config = HiFTConfig(waiting=self.options.waiting, weights=self.options.weights)
        if config.parks:
            park_for_hift(loaded.model, config)
        return loaded.model

    def follow(self, facts: Mapping[str, Any], given: frozenset[str]) -> None:
        """Copy the schedule of the first run, except for what was typed now: its defaults may have been others."""
        saved = facts.get("hift", {})
        is_auto = self.options.layers_per_group == "auto"
        asked = given - {"layers_per_group"} if is_auto else given
        followed = {name: saved[name] for name in SCHEDULE if saved.get(name) is not None and name not in asked}
        if "layers_per_group" in followed:
            followed["gpu"] = None
        self.options = replace(self.options, **followed)

    def settle(self, request: Callable[[], PlanRequest], config: PreTrainedConfig, say: Callable[[str], None]) -> None:
        """Choose the number of layers per group, if it is `auto`."""
        options = self.options
        if options.layers_per_group != "auto":
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
                    prefetch_bytes=None if options.prefetch_bytes == "auto" else options.prefetch_bytes,
                    tell=say,
                )
        except ValueError as error:
            raise ValueError(f"--layers_per_group auto: {error}") from error
        self.options = replace(options, layers_per_group=choice.chosen.layers_per_group, gpu=None)
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
                "layers_per_group": None if options.layers_per_group == "auto" else options.layers_per_group,
                "steps_per_group": options.steps_per_group,
                "order": options.order,
            },
            "layers": options.layers,
        }

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
        groups = f"{hift.num_groups} groups, {num_layers} layers in all, {hift.config.order}; {turns}"
        lines = [f"  groups  {groups if hift.num_groups > 1 else f'one of all {num_layers} layers, in each update'}"]
        if hift.config.waiting is not None:
            lines.append(f"  layers  idle ones in {hift.config.waiting}, also in evaluation; saved weights are exact")
        if hift.config.inactive == "above" and hift.num_groups > 1:
            lines.append(f"  layers  those above the group step, too, at {hift.config.inactive_rate:g} of its rate")
        return lines

    def notes(self, model: torch.nn.Module, *, learning_rate: float | None) -> list[str]:
        """Warn of a default learning rate that is meant for dense fine-tuning."""
        if learning_rate is None or self.optimizer.num_groups == 1:
            return []
        others = "half and twice" if self.optimizer.config.steps_per_group == 1 else "twice and four times"
        return [RATE_HINT.format(groups=self.optimizer.num_groups, rate=learning_rate, others=others)]

    def settings(self) -> dict[str, Any]:
        """Return HiFT's settings and the number of groups. `weights`, a dtype in results, becomes `weights_place`."""
        given = self.values()
        given["weights_place"] = given.pop("weights")
        return {**given, "num_groups": self.optimizer.num_groups}


def _usable_bytes(card: Card, asked: str | None) -> int:
    """Return the memory of a named card in bytes, or for the card here the memory that other processes leave free."""
    if asked is not None:
        return card.memory_bytes
    return usable_bytes()
