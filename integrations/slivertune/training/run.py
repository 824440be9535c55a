"""`slivertune train`: evaluate, train, evaluate again, save the model, report."""

import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from slivertune.core import atomic
from slivertune.core.options import enum_value
from slivertune.core.typed_command import typed_command
from slivertune.training.assemble import Run
from slivertune.training.command_line.parse import TrainArguments
from slivertune.training.command_line.settings_file import older_defaults_note, write_settings
from slivertune.training.device_peak import DevicePeak
from slivertune.training.display import describe_metrics
from slivertune.training.early_stopping import check_best_metric
from slivertune.training.folders import (
    SETTINGS_NAME,
    START_NAME,
    checkpoint_folders,
    newest_whole,
    read_results,
)
from slivertune.training.options.parser import without_unset
from slivertune.training.output.beside_dense import measure_dense
from slivertune.training.output.largest_batch import LargestBatch
from slivertune.training.output.plan_line import batch_of, plan_run
from slivertune.training.output.planned_update import plan_update
from slivertune.training.output.report import Results, Sample, describe, print_results, write_results
from slivertune.training.ranks.launchers import is_started_by_launcher
from slivertune.training.run_report.command import draw_at_the_end
from slivertune.training.run_report.run_log import write_run_log


def execute(run: Run, console: Console) -> Results:
    """Train a run and report its results.

    Args:
        run: Run from `assemble`.
        console: Console to write to.

    Returns:
        The results, which are also in the run's folder.

    Raises:
        RuntimeError: If too many updates in a row are not finite.
    """
    with closing(run):
        return _execute(run, console)


def describe_interruption(arguments: TrainArguments) -> tuple[str, list[str]]:
    """Describe the last whole checkpoint of an interrupted run and the command that continues it, or its end.

    Args:
        arguments: Settings of the run.

    Returns:
        One line, and the words of the command that it introduces.
    """
    folder = Path(str(arguments.training.output_dir))
    results = read_results(folder)
    if results is not None and tuple(results["command"]) == arguments.command:
        finished = f"the run in {folder} is finished after {results['num_steps']} updates, and saved"
        return f"interrupted; {finished}; draw it with:", [*typed_command("report", str(folder))]
    checkpoint, _ = newest_whole(folder, read_files=False)
    words, launcher = arguments.command[2:], ""
    # An interrupted save leaves files in the folder, which only a resumed run overwrites.
    if checkpoint is not None or (arguments.folder.checkpoint is None and checkpoint_folders(folder)):
        replaced = ("output_dir", "resume_from_checkpoint")
        resumed = "true" if checkpoint is not None else "auto"
        words = (*without_unset(_without_options(words, replaced), replaced), "--output_dir", str(folder))
        words = (*words, "--resume_from_checkpoint", resumed)
    command = [*typed_command("train", *words)]
    if is_started_by_launcher():
        # All three launchers take this spelling; deepspeed has no -m.
        command = ["--module", "slivertune", "train", *words]
        launcher = "the launcher that started this run (accelerate launch, torchrun, deepspeed), its options, and "
    if checkpoint is None:
        return f"interrupted before the first checkpoint; start again with: {launcher}".rstrip(), command
    return f"interrupted; the last whole checkpoint is {checkpoint}; continue with: {launcher}".rstrip(), command


def _without_options(words: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Drop options of one value each from a command line, however they are spelled.

    Args:
        words: Words of the command line.
        names: Names of the options, with underscores.
    """
    kept, is_value = list[str](), False
    for word in words:
        option, equals, _ = word.partition("=")
        is_dropped = option.startswith("--") and option[2:].replace("-", "_") in names
        if not is_value and not is_dropped:
            kept.append(word)
        is_value = is_dropped and not equals
    return tuple(kept)


def describe_finished(arguments: TrainArguments) -> str:
    """Describe a requested run that is already finished, and the command that started it.

    Args:
        arguments: Settings, whose folder holds the results.

    Returns:
        One line.
    """
    folder = arguments.folder.path
    results = read_results(folder)
    assert results is not None, "found when the settings were read"
    command = shlex.join(typed_command(*results["command"][1:]))
    return (
        f"the run in {folder} is finished after {results['num_steps']} updates; nothing was trained. It was started "
        f"by: {command}. To train on, raise --max_steps or --num_train_epochs; to start again, name another "
        "--output_dir"
    )


def _execute(run: Run, console: Console) -> Results:
    training = run.arguments.training
    output_folder = Path(str(training.output_dir))
    note = None
    if run.coordinator.is_first:
        output_folder.mkdir(parents=True, exist_ok=True)
        atomic.write_json(output_folder / START_NAME, {"command": run.arguments.command})
        note = older_defaults_note(run.arguments)  # before the file that was read may be replaced
        write_settings(run.arguments, output_folder / SETTINGS_NAME)
    describe(run)
    if note is not None:
        run.display.say(f"note: {note}")
    # Only the first rank measures and prints.
    is_measured = run.arguments.run.memory_ledger != "off" and run.coordinator.is_first
    plan, device_peak, largest_batch = plan_run(run) if is_measured else None, DevicePeak(), LargestBatch()
    if is_measured:
        run.trainer.add_callback(device_peak)
        largest_batch.watch(run.trainer)
    planned_update = plan_update(run, plan)
    # torch writes the Trainer's own files, and its errors need an explanation.
    with atomic.explain_write_errors(output_folder):
        if run.layout == "single":
            _evaluate_before(run)
        else:
            # Only training prepares a model for its layout. If it were evaluated before, it would never be wrapped.
            run.display.before_training = lambda: _evaluate_before(run)
        output = run.trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    if _train_batch_size(run) < training.per_device_train_batch_size:
        run.display.say(
            f"note: --auto_find_batch_size has lowered --per_device_train_batch_size from "
            f"{training.per_device_train_batch_size} to {_train_batch_size(run)}"
        )
    if run.coordinator.is_first:
        write_run_log(run.trainer.state, output_folder)
    after = _evaluate(run)
    saved = run.method.save(run.trainer, output_folder, base_name=run.source.name_or_path, coordinator=run.coordinator)
    sample, probe = None, run.probe
    if probe is not None:
        before = run.facts["sample_before"]
        sample = Sample(prompt=probe.prompt, before=before, after=probe.ask(), expected=probe.expected)
    peak = None if run.ledger is None else run.ledger.peak
    results = Results(
        method=run.method.name,
        model=run.model_name,
        dataset=run.dataset_name,
        num_parameters=run.num_parameters,
        num_trained=run.num_trained,
        device=str(training.device),
        world_size=training.world_size,
        layout=run.layout,
        settings=_settings(run),
        before=run.facts["before"],
        after=after,
        num_steps=output.global_step,
        steps_per_second=run.metrics.num_updates / run.metrics.seconds if run.metrics.seconds else None,
        num_skipped=run.guard.num_skipped,
        peak=peak,
        highest=None if run.ledger is None else run.ledger.highest,
        planned_peak_bytes=None if plan is None else plan.peak_bytes,
        # The allocator's peak on CUDA, the ledger's count elsewhere.
        measured_peak_bytes=device_peak.num_bytes or (None if peak is None else peak.device),
        planned_host_bytes=None if plan is None else plan.host_bytes,
        planned_disk_bytes=None if plan is None else plan.disk_bytes,
        planned_batch=None if plan is None else batch_of(plan.request),
        largest_batch=largest_batch.size,
        planned_update=planned_update.time,
        planned_update_note=planned_update.note,
        tokens_per_second=run.metrics.tokens_per_second,
        model_folder=saved.model_folder,
        delta_folder=saved.delta_folder,
        merge_command=saved.merge_command,
        best_checkpoint=_best_checkpoint(run),
        checkpoint=newest_whole(output_folder, read_files=False)[0] if run.coordinator.is_first else None,
        sample=sample,
        command=run.arguments.command,
    )
    if run.coordinator.is_first:
        write_results(results, output_folder)
        run.interruption.close()  # all is saved: Ctrl-C ends the measurement or the picture alone
        results = replace(results, dense=measure_dense(run, console))
        results_path = write_results(results, output_folder)
        picture = draw_at_the_end(output_folder, run.display.say) if run.arguments.run.report else None
        print_results(results, console, results_path, picture)
    return results


def _best_checkpoint(run: Run) -> Path | None:
    """Return the checkpoint whose model was loaded at the end, by `--load_best_model_at_end`, or None if none was."""
    best = run.trainer.state.best_model_checkpoint
    return None if best is None or not run.arguments.training.load_best_model_at_end else Path(best)


def _evaluate_before(run: Run) -> None:
    if "before" not in run.facts:
        run.facts["before"] = _evaluate(run)
        run.facts["sample_before"] = None if run.probe is None else run.probe.ask()
    run.display.say(f"evaluation before: {describe_metrics(run.facts['before'])}")


def _evaluate(run: Run) -> dict[str, float]:
    metrics = run.trainer.evaluate()
    check_best_metric(run.arguments.training, metrics)
    return {name: float(metrics[name]) for name in ("eval_loss", "eval_accuracy") if name in metrics}


def _train_batch_size(run: Run) -> int:
    """Return the rows of a batch on one device, which `--auto_find_batch_size` may have lowered."""
    return run.trainer.state.train_batch_size or run.arguments.training.per_device_train_batch_size


def _settings(run: Run) -> dict[str, Any]:
    """Return the settings that affect the results, besides the model and the data."""
    training, precision = run.arguments.training, run.arguments.precision
    names = (
        "learning_rate",
        "weight_decay",
        "max_grad_norm",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "seed",
    )
    return {
        **{name: getattr(training, name) for name in names},
        "per_device_train_batch_size": _train_batch_size(run),
        "optim": run.method.optimizer_name(training),
        "lr_scheduler_type": enum_value(training.lr_scheduler_type),
        "layerwise_lr_decay": run.arguments.run.layerwise_lr_decay,
        "weights": precision.loading,
        "autocast": precision.autocast,
        "max_length": run.task.max_length,
        "chat_template_date": run.task.chat_template_date,
        "load_in_4bit": run.arguments.model.load_in_4bit,
        "keep_activations": run.arguments.run.keep_activations,
        "offload_activations": run.arguments.run.offload_activations,
        "token_tile_size": run.arguments.run.token_tile_size,
        "chunked_cross_entropy": run.loss is not None,
        "token_ratio": run.arguments.tokens.token_ratio,
        "token_pattern": None if run.tokens is None else run.tokens.pattern,
        **run.method.settings(),
    }
