"""From checked arguments to a Trainer that is ready to train: model, data, method and callbacks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments, set_seed

from slivertune import __version__
from slivertune.hift import HiFT
from slivertune.training.arguments import TrainArguments, enum_value
from slivertune.training.attach import attach_hift
from slivertune.training.callbacks import CheckpointMarker, NonFiniteGuard
from slivertune.training.checkpoints import read_facts
from slivertune.training.data import load_from_arguments
from slivertune.training.defaults import BASE_RECIPE, RATE_HINT
from slivertune.training.display import Display
from slivertune.training.embedded import prepare_base_model, reference_splits
from slivertune.training.ledger_lines import Cycle, DenseCycle, HiFTCycle, LedgerLines
from slivertune.training.models import ModelSource, load_model, open_model
from slivertune.training.prepare import prepare_task
from slivertune.training.samples import Probe, make_probe
from slivertune.training.task import Task

_FEWEST_UPDATES_A_LINE = 8
"""A cycle shorter than this shares its line with the next ones."""
_COUNTED_CYCLES = 2
"""Cycles of `--memory_ledger first_cycles`: the first creates the state, the second is like all later ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that is ready to start."""

    arguments: TrainArguments
    source: ModelSource
    task: Task
    trainer: Trainer
    hift: HiFT | None
    display: Display
    guard: NonFiniteGuard
    ledger: LedgerLines | None
    probe: Probe | None
    """Asked before and after."""
    facts: dict[str, Any]
    """What every checkpoint's marker carries; `before` and `sample_before` are filled in when they are known."""

    @property
    def model_name(self) -> str:
        """What to call the model."""
        return self.arguments.model.model_name_or_path or "the embedded base model"

    @property
    def dataset_name(self) -> str:
        """What to call the data."""
        return self.arguments.data.dataset or "the Python language reference"

    def close(self) -> None:
        """Take everything off the model and the screen, also after a failure."""
        self.display.close()
        self.guard.close()
        if self.ledger is not None:
            self.ledger.close()
        if self.hift is not None:
            self.hift.detach()


def assemble(arguments: TrainArguments, console: Console) -> Run:
    """Load and make everything that a run needs. Trains the embedded base model if it is asked for and not there.

    Args:
        arguments: The settings.
        console: Where to write.

    Returns:
        The run.

    Raises:
        ValueError: If model, data and settings don't fit each other.
        RuntimeError: If this Python lacks the texts of the embedded default.
        ConnectionError: If the hub is needed and can't be reached.
    """
    training, method = arguments.training, arguments.method
    facts = _facts(arguments)
    set_seed(training.seed)
    bar = not training.disable_tqdm
    embedded = None
    if arguments.model.model_name_or_path is None:
        embedded = prepare_base_model(BASE_RECIPE, console, bar=bar)
    source = open_model(arguments.model, embedded)
    if arguments.data.dataset is None:
        splits = reference_splits()
    else:
        splits = load_from_arguments(arguments.data, seed=training.seed)
    task = prepare_task(arguments.data, source.tokenizer, source.config, splits)
    model = load_model(
        source, task, precision=arguments.precision, attn_implementation=arguments.model.attn_implementation
    )
    display = Display(console, bar=bar)
    _settle(training, display)
    marker = CheckpointMarker(facts, training.save_total_limit)
    training.save_total_limit = None
    guard = NonFiniteGuard(method.non_finite_limit, display.say)
    trainer = Trainer(
        model=model,
        args=training,
        processing_class=source.tokenizer,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset,
        data_collator=task.data_collator,
        compute_metrics=task.compute_metrics,
        preprocess_logits_for_metrics=task.preprocess_logits_for_metrics,
        compute_loss_func=None if task.compute_loss_func is None else guard.watch_loss(task.compute_loss_func),
        callbacks=[guard, marker, display],
    )
    # The display takes the place of either.
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    hift = attach_hift(trainer, method.hift_config(training.seed)) if method.method == "hift" else None
    run = Run(
        arguments=arguments,
        source=source,
        task=task,
        trainer=trainer,
        hift=hift,
        display=display,
        guard=guard,
        ledger=_add_ledger(trainer, arguments, hift, display),
        probe=make_probe(trainer, task, source.tokenizer, asked=method.sample_prompt, num_tokens=method.sample_tokens),
        facts=facts,
    )
    _describe(run)
    return run


def _facts(arguments: TrainArguments) -> dict[str, Any]:
    """What checkpoints should carry; for a resumed run, what its checkpoint carries, if the method is the same."""
    method = arguments.method
    facts: dict[str, Any] = {"method": method.method}
    if method.method == "hift":
        facts["hift"] = {name: getattr(method, name) for name in ("layers_per_group", "steps_per_group", "order")}
    checkpoint = arguments.folder.checkpoint
    if checkpoint is None:
        return facts
    saved = read_facts(checkpoint)
    for name, value in facts.items():
        if saved.get(name) != value:
            raise ValueError(
                f"{checkpoint} was trained with {name}={saved.get(name)}, and this run asks for {name}={value}; repeat "
                "the first run's settings, or start anew without --resume_from_checkpoint"
            )
    return saved


def _settle(training: TrainingArguments, display: Display) -> None:
    if training.n_gpu > 1:
        # The Trainer would spread each batch over all of them by DataParallel, which HiFT can't rotate under.
        display.say(f"{training.n_gpu} GPUs are here; this run uses the first")
        training._n_gpu = 1


def _add_ledger(trainer: Trainer, arguments: TrainArguments, hift: HiFT | None, display: Display) -> LedgerLines | None:
    training = arguments.training
    cycle: Cycle = DenseCycle()
    if hift is not None:
        num_rounds = math.ceil(_FEWEST_UPDATES_A_LINE / hift.cycle_length)
        cycle = HiFTCycle(hift, num_rounds)
        if "logging_steps" not in arguments.given:
            training.logging_steps = num_rounds * hift.cycle_length
    elif "logging_steps" not in arguments.given:
        training.logging_steps = _FEWEST_UPDATES_A_LINE
    if arguments.method.memory_ledger == "off":
        return None
    if training.torch_compile:
        display.say("the memory ledger is off: it can't see into what torch.compile makes")
        return None
    num_cycles = _COUNTED_CYCLES if arguments.method.memory_ledger == "first_cycles" else None
    model: Any = trainer.model
    ledger = LedgerLines(model, cycle, display.say, num_cycles)
    trainer.add_callback(ledger)
    return ledger


def _describe(run: Run) -> None:
    """Say what is about to be done."""
    say, training, hift = run.display.say, run.arguments.training, run.hift
    model: Any = run.trainer.model
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    dtypes = "/".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}))
    say(f"slivertune {__version__}: {run.arguments.method.method} on {run.model_name}")
    say(f"  model   {num_parameters:,} weights in {dtypes} on {training.device}")
    say(
        f"  data    {run.dataset_name}: {len(run.task.train_dataset):,} rows to train on, "
        f"{len(run.task.eval_dataset):,} to evaluate on, up to {run.task.max_length} tokens each"
    )
    if hift is not None:
        layers = [layer.name for group in hift.groups for layer in group.layers]
        config = hift.config
        say(
            f"  groups  {hift.num_groups} of {len(layers)} layers, {config.order}; every group has had its turn after "
            f"{hift.cycle_length} updates"
        )
    schedule = enum_value(training.lr_scheduler_type)
    say(f"  rate    {training.learning_rate:g}, {enum_value(training.optim)}, {schedule} schedule")
    say(f"  writes  {training.output_dir}")
    embedded = run.arguments.model.model_name_or_path is None
    if hift is not None and hift.num_groups > 1 and not embedded and "learning_rate" not in run.arguments.given:
        say("note: " + RATE_HINT.format(cycle=hift.cycle_length, rate=training.learning_rate))
    if run.arguments.method.method == "dense" and any(p.dtype == torch.bfloat16 for p in model.parameters()):
        say("note: dense fine-tuning of bf16 weights keeps no fp32 masters; updates below a weight's last bit are lost")
    for note in run.arguments.folder.notes:
        say(f"note: {note}")
    if run.arguments.folder.checkpoint is not None:
        say(f"note: continuing from {run.arguments.folder.checkpoint}")
