"""Builds a run that is ready to train from checked arguments: model, data, method, Trainer and callbacks."""

import dataclasses
from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments, set_seed

from slivertune.chunked_loss import ChunkedCrossEntropyHandle
from slivertune.core.kept_activations import KeptActivationsHandle
from slivertune.core.offloaded_activations import OffloadedActivationsHandle
from slivertune.core.refused_pairs import refuse_together
from slivertune.core.token_tiles import TokenTilesHandle, tile_tokens
from slivertune.core.transformers_internals import today_in_templates, use_one_device
from slivertune.interop.checkpoints import keep_manifest_last, stop_at_the_end
from slivertune.interop.compilation import BlockCompilation
from slivertune.interop.training_metrics import TrainingMetrics, metrics_of
from slivertune.parked import ParkedLayers
from slivertune.parked.kept_on_host import keep_blocks_on_host
from slivertune.tokentune import TokenTuneHandle
from slivertune.training.callbacks import CheckpointMarker, NonFiniteGuard, keep_events_in
from slivertune.training.command_line.parse import TrainArguments
from slivertune.training.data.splits import check_datasets, load_datasets
from slivertune.training.display import Display
from slivertune.training.early_stopping import EarlyStopping
from slivertune.training.embedded.base_model import BASE_RECIPE, prepare_base_model
from slivertune.training.embedded.built_in import REFERENCE, built_in_of, counts_answers
from slivertune.training.folders import read_facts
from slivertune.training.interruption import Interruption
from slivertune.training.layerwise_lr import LayerwiseTrainer
from slivertune.training.ledger_lines import LedgerLines
from slivertune.training.loss import attach_loss
from slivertune.training.methods import TrainingMethod
from slivertune.training.methods.tokens import attach_tokens
from slivertune.training.models import ModelSource, load_model, num_weights, open_model
from slivertune.training.options.arguments import is_date
from slivertune.training.planned_request import plan_request
from slivertune.training.ranks.coordinator import LaunchCoordinator
from slivertune.training.ranks.processes import settle_layout
from slivertune.training.resumed_facts import (
    check_base,
    check_facts,
    check_rows,
    check_schedule,
    rows_per_update,
    training_facts,
)
from slivertune.training.tasks.answers import count_right_answers
from slivertune.training.tasks.prepare import prepare_datasets
from slivertune.training.tasks.samples import Probe, make_probe
from slivertune.training.tasks.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that is ready to start."""

    arguments: TrainArguments
    coordinator: LaunchCoordinator
    """Coordinator of the run's processes, of which there may be only one."""
    layout: str
    """Layout of the processes: single, ddp, fsdp2, zero1, zero2 or zero3."""
    source: ModelSource
    task: Task
    trainer: Trainer
    loss: ChunkedCrossEntropyHandle | None
    """Handle of the chunked loss. None if the loss uses whole logits, or the model is no causal language model."""
    tokens: TokenTuneHandle | None
    """Handle of TokenTune. None if all tokens carry gradient."""
    kept: KeptActivationsHandle | None
    """Handle of blocks that keep their activations under checkpointing. None without `--keep_activations`."""
    offloaded: OffloadedActivationsHandle | None
    """Handle of offloaded activations. None if the inputs of checkpointed blocks remain on the device."""
    tiles: TokenTilesHandle | None
    """Handle of the token tiles. None if MLPs and norms see whole batches."""
    parked: ParkedLayers | None
    """Handle of the parked weights. None if none are, or HiFT parks them."""
    num_parameters: int
    """Weights of the model, adapters included."""
    num_trained: int
    """Weights that the method trains."""
    display: Display
    metrics: TrainingMetrics
    """Counters of updates, tokens and seconds, which complete the Trainer's log."""
    guard: NonFiniteGuard
    interruption: Interruption
    compilation: BlockCompilation
    """Compilation by block. It does nothing without `--torch_compile` or a launcher's dynamo backend."""
    ledger: LedgerLines | None
    probe: Probe | None
    """Question to the model, asked before and after training. None if there is none."""
    facts: dict[str, Any]
    """Plain data in the manifest of every checkpoint. `before` and `sample_before` are added once they are known."""

    @property
    def method(self) -> TrainingMethod:
        """The method that trains the model."""
        return self.arguments.method

    @property
    def model_name(self) -> str:
        """The model's name in reports."""
        return self.arguments.model.model_name_or_path or "the embedded base model"

    @property
    def dataset_name(self) -> str:
        """The datasets' names in reports."""
        return " + ".join(self.arguments.data.dataset or [])

    def close(self) -> None:
        """Detach everything from the model and the screen, also after a failure."""
        self.interruption.close()
        self.display.close()
        if self.ledger is not None:
            self.ledger.close()
        if self.loss is not None:
            self.loss.remove()
        if self.tokens is not None:
            self.tokens.remove()
        if self.kept is not None:
            self.kept.remove()
        if self.offloaded is not None:
            self.offloaded.remove()
        if self.tiles is not None:
            self.tiles.remove()
        self.compilation.end()
        self.method.close()
        if self.parked is not None:
            self.parked.remove()


def assemble(arguments: TrainArguments, console: Console, coordinator: LaunchCoordinator | None = None) -> Run:
    """Load and build all parts of a run. If the embedded base model is requested and missing, train it first.

    Args:
        arguments: Checked settings.
        console: Console to write to.
        coordinator: Coordinator of this run's processes; None for a single process. One process per machine makes the
            base model and the data files while the others wait.

    Returns:
        The run.

    Raises:
        ValueError: If model, data and settings don't fit each other.
        RuntimeError: If this Python lacks the texts of a built-in dataset.
        ConnectionError: If the hub is needed and can't be reached.
        SilentError: If a process that this one waits for has failed.
    """
    coordinator = coordinator or LaunchCoordinator()
    training, method, facts = arguments.training, arguments.method, _facts(arguments)
    set_seed(training.seed)
    bar = not training.disable_tqdm and coordinator.is_first
    embedded = None
    if arguments.model.model_name_or_path is None:
        # Check the datasets first: training the base model takes minutes.
        check_datasets(arguments.data)
        embedded = coordinator.first_here("base model", lambda: prepare_base_model(BASE_RECIPE, console, bar=bar))
    source = coordinator.first_here("tokenizer", lambda: open_model(arguments.model, embedded))
    day = _chat_template_date(arguments, facts, coordinator)
    task = coordinator.first_here("data", lambda: _prepare_data(arguments, source, day))
    check_rows(arguments.folder.checkpoint, facts, {"train": task.train_dataset, "eval": task.eval_dataset})
    if isinstance(task.eval_dataset, Sized):
        _check_dropped_rows(training, len(task.eval_dataset))
    if task.chat_template_date is not None:
        # A resumed run, and one repeated from the settings, must read the same rows.
        facts["chat_template_date"] = arguments.values["chat_template_date"] = task.chat_template_date
    loaded = load_model(
        source,
        task,
        precision=arguments.precision,
        attn_implementation=arguments.model.attn_implementation,
        four_bit_device=training.device if arguments.model.load_in_4bit else None,
    )
    check_base(arguments.folder.checkpoint, facts, loaded.model, source.name_or_path)
    model = method.adapt(loaded, task)
    # The Trainer moves the model to the GPU, which need not have room for the exact weights.
    parked = kept_on_host = None
    if arguments.parked.is_asked and method.is_optimizer:
        kept_on_host = keep_blocks_on_host(model)
    elif arguments.parked.is_asked:
        parked = method.park(model, arguments.parked)
    counts = [(num_weights(parameter), parameter.requires_grad) for parameter in model.parameters()]
    display = Display(console, bar=bar)
    if "log_level_replica" not in arguments.given:
        # Only the first process logs.
        training.log_level_replica = "error"
    if training.train_sampling_strategy == "group_by_length":
        display.say("note: with group_by_length a run can only be resumed from a checkpoint at the end of an epoch")
    if training.n_gpu > 1:
        # The Trainer would split each batch over all GPUs by DataParallel, under which HiFT can't rotate groups.
        display.say(f"{training.n_gpu} GPUs are visible, and this run uses the first")
        use_one_device(training)
    marker = CheckpointMarker(facts, training.save_total_limit)
    training.save_total_limit = None
    guard = NonFiniteGuard(arguments.run.non_finite_limit, display.say, stops=method.steps_in_backward)
    trainer = _trainer_class(arguments)(
        model=model,
        args=training,
        processing_class=source.tokenizer,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset,
        data_collator=task.data_collator,
        compute_metrics=task.compute_metrics,
        preprocess_logits_for_metrics=task.preprocess_logits_for_metrics,
        compute_loss_func=task.compute_loss_func,
        callbacks=[guard, display],
    )
    guard.watch(trainer)
    if arguments.run.early_stopping_patience is not None:
        # It restores its count itself. The Trainer would make another from the checkpoint, with the earlier patience.
        training.restore_callback_states_from_checkpoint = False
        trainer.add_callback(EarlyStopping(arguments.run.early_stopping_patience, display.say))
    keep_events_in(trainer, arguments.folder.path)
    metrics = metrics_of(trainer)
    metrics.add(guard.metrics)
    layout = settle_layout(trainer)
    guard.can_skip = not layout.startswith("zero")
    # The display replaces both.
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    method.settle(
        partial(plan_request, arguments, trainer, task, layout, is_chunked=arguments.run.chunked_cross_entropy),
        source.config,
        display.say,
    )
    facts.update(method.facts())
    # Attach the method before TokenTune: SFT may replace a layer's forward, and TokenTune reads the one it finds.
    method.attach(trainer)
    if kept_on_host is not None:
        kept_on_host.remove()
        parked = method.park(model, arguments.parked)
        model.to(training.device)
    tiles = _attach_tiles(trainer.model, arguments.run.token_tile_size, layout)
    tokens = attach_tokens(trainer, arguments.tokens, checkpoint=arguments.folder.checkpoint)
    # Compile by block: fewer graphs, and a chunked loss. No other compilation survives HiFT's rotation or TokenTune.
    compilation = BlockCompilation(trainer, fullgraph=method.name == "hift" or tokens is not None)
    compilation.begin()
    loss = attach_loss(trainer, task, display.say, wanted=arguments.run.chunked_cross_entropy)
    num_kept, trained_model = arguments.run.keep_activations, trainer.model
    # The handle comes before checkpointing, which the Trainer enables when training begins.
    kept = None if num_kept is None or trained_model is None else KeptActivationsHandle(trained_model, num_kept)
    offloaded = None
    if arguments.run.offload_activations and trained_model is not None:
        offloaded = OffloadedActivationsHandle(trained_model)
    # Add the marker after all callbacks that write into checkpoints.
    keep_manifest_last(trainer, marker)
    interruption = Interruption(display.say)
    trainer.add_callback(interruption)
    stop_at_the_end(trainer)
    return Run(
        arguments=arguments,
        coordinator=coordinator,
        layout=layout,
        source=source,
        task=task,
        trainer=trainer,
        loss=loss,
        tokens=tokens,
        kept=kept,
        offloaded=offloaded,
        tiles=tiles,
        parked=parked,
        num_parameters=sum(count for count, _ in counts),
        num_trained=method.num_trained(sum(count for count, is_trained in counts if is_trained)),
        display=display,
        metrics=metrics,
        guard=guard,
        interruption=interruption,
        compilation=compilation,
        ledger=_add_ledger(trainer, arguments, display, coordinator),
        probe=make_probe(
            trainer,
            task,
            source.tokenizer,
            asked=arguments.run.sample_prompt,
            num_tokens=arguments.run.sample_tokens,
            cut="sample_prompt" not in arguments.given,
        ),
        facts=facts,
    )


def _trainer_class(arguments: TrainArguments) -> Callable[..., Trainer]:
    """Return the Trainer, or the one whose optimizer has learning rates by layer."""
    decay = arguments.run.layerwise_lr_decay
    if decay == 1:
        return Trainer
    return partial(LayerwiseTrainer, decay=decay, layers=getattr(arguments.method.options, "layers", None))


def _check_dropped_rows(training: TrainingArguments, num_rows: int) -> None:
    """Refuse to drop rows of the evaluation, which `--dataloader_drop_last` does as well as those of an epoch."""
    batch = training.per_device_eval_batch_size * training.world_size
    if training.dataloader_drop_last and num_rows % batch:
        raise ValueError(
            f"--dataloader_drop_last true would also leave out {num_rows % batch} of the {num_rows} rows to evaluate "
            f"on, of which {batch} are evaluated at once. Set a --per_device_eval_batch_size that divides them, or "
            "leave --dataloader_drop_last out"
        )


def _attach_tiles(model: Any, tile_size: int | None, layout: str) -> TokenTilesHandle | None:
    if tile_size is None:
        return None
    if layout == "zero3":
        refuse_together({"tile_tokens": "--token_tile_size", "zero3": "ZeRO-3"})
    return tile_tokens(model, tile_size)


def _facts(arguments: TrainArguments) -> dict[str, Any]:
    """Return the facts for checkpoints. For a resumed run, return its checkpoint's, once they match the settings."""
    checkpoint = arguments.folder.checkpoint
    saved = None if checkpoint is None else read_facts(checkpoint)
    if checkpoint is not None and saved is not None:
        _follow(arguments, checkpoint, saved)
    # A feature that is off is None, as in older checkpoints that do not know it.
    facts: dict[str, Any] = {
        "method": arguments.method.name,
        **arguments.method.facts(),
        "load_in_4bit": arguments.model.load_in_4bit or None,
        "layerwise_lr_decay": None if arguments.run.layerwise_lr_decay == 1 else arguments.run.layerwise_lr_decay,
        "token_ratio": arguments.tokens.token_ratio,
        "token_pattern": arguments.tokens.token_pattern,
        "built_in_dataset": None if built_in_of(arguments.data.dataset) is None else arguments.data.dataset,
        "seed": arguments.training.seed,
        "data_seed": arguments.training.data_seed,
        "training": training_facts(arguments.training),
    }
    if checkpoint is None or saved is None:
        return {**facts, "rows_per_update": rows_per_update(arguments.training)}
    if "built_in_dataset" not in saved:
        if "dataset" not in arguments.given:
            raise ValueError(
                f"{checkpoint} does not say on which data it was trained, and the default was another then. Name it: "
                f"--dataset {REFERENCE}, or the run's own"
            )
        saved["built_in_dataset"] = facts["built_in_dataset"]
    for name in ("seed", "training"):
        saved.setdefault(name, facts[name])  # older checkpoints do not know them
    about = arguments.method.about
    check_facts(checkpoint, saved, facts, {**about.values(about.make({})), **facts["training"]})
    check_schedule(checkpoint, saved, arguments.training)
    return saved


def _follow(arguments: TrainArguments, checkpoint: Path, saved: dict[str, Any]) -> None:
    """Let the method copy the settings of the first run that were not given now, and keep them in the run file."""
    method, asked = arguments.method, arguments.given
    before = method.values()
    if arguments.model.model_name_or_path is None:
        # The embedded model's rate and number of updates depend on these, so that other ones are refused.
        asked = asked.union(before)
    try:
        method.follow(saved, asked)
    except ValueError as error:
        raise ValueError(
            f"{checkpoint} can't be resumed with the options given now, or by this version: {error}. Leave these "
            "options out, or continue with the version of slivertune that wrote it"
        ) from error
    arguments.values.update({name: value for name, value in method.values().items() if value != before[name]})


def _chat_template_date(arguments: TrainArguments, facts: dict[str, Any], coordinator: LaunchCoordinator) -> str:
    """Return the date for chat templates: the requested one, the checkpoint's, or that of the run's start."""
    asked, saved = arguments.data.chat_template_date, facts.get("chat_template_date")
    if saved is not None and not is_date(saved):
        raise ValueError(
            f"{arguments.folder.checkpoint} has chat_template_date={saved!r}, which is no date. Resume from another "
            "checkpoint, or start again without --resume_from_checkpoint"
        )
    if asked is not None and saved is not None and asked != saved:
        raise ValueError(
            f"{arguments.folder.checkpoint} was trained with chat_template_date={saved}, and this run asks for "
            f"chat_template_date={asked}. Leave it out, or start again without --resume_from_checkpoint"
        )
    # One process decides, since around midnight the processes could disagree.
    return asked or saved or coordinator.decide("the date", lambda: today_in_templates().isoformat())


def _prepare_data(arguments: TrainArguments, source: ModelSource, day: str) -> Task:
    data = arguments.data
    if data.task == "causal_lm":
        data = dataclasses.replace(data, chat_template_date=day)
    seed = arguments.training.seed
    task = prepare_datasets(data, source.tokenizer, source.config, load_datasets(data, seed=seed), seed=seed)
    if counts_answers(data.dataset, data.task, is_packed=data.packing):
        task = count_right_answers(task)
    if "chat_template_date" in arguments.given and task.chat_template_date is None:
        nowhere = "no chat template of this run writes today's date"
        options = {word.partition("=")[0].replace("-", "_") for word in arguments.command}
        if "__chat_template_date" in options:
            raise ValueError(f"chat_template_date={day}: {nowhere}. Leave it out")
        # A run file may serve several models, so there it is no error.
        line = f"chat_template_date={day} is not read: {nowhere}"
        task = dataclasses.replace(task, notes=(*task.notes, line))
    if task.chat_template is not None:
        # The model is saved with the template that it was trained with.
        source.tokenizer.chat_template = task.chat_template
    return task


def _add_ledger(
    trainer: Trainer, arguments: TrainArguments, display: Display, coordinator: LaunchCoordinator
) -> LedgerLines | None:
    method = arguments.method
    if "logging_steps" not in arguments.given:
        arguments.training.logging_steps = method.logging_steps()
    if arguments.run.memory_ledger == "off" or not coordinator.is_first:
        return None
    if coordinator.world_size > 1:
        display.say(f"the memory ledger counts rank 0 only, of {coordinator.world_size} ranks")
    if arguments.training.torch_compile:
        display.say("the memory ledger is off: it can't see into graphs of torch.compile")
        return None
    # The first cycle creates the state. The second is like all later ones.
    num_cycles = 2 if arguments.run.memory_ledger == "first_cycles" else None
    model: Any = trainer.model
    ledger = LedgerLines(model, method.cycle, display.say, num_cycles, method.claim_state)
    trainer.add_callback(ledger)
    return ledger
