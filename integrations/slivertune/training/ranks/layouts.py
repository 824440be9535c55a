"""What `slivertune train` sees to under each layout, beside what `slivertune.attach` does."""

from pathlib import Path
from typing import Any

from transformers import Trainer

from slivertune.core.layout import Layout
from slivertune.parallel.layout import layout_of
from slivertune.parallel.zero.unsupported import fill_buckets


def settle_layout(trainer: Trainer) -> Layout:
    """Name a Trainer's layout; see that ZeRO takes buckets by the model's width, and ZeRO-3 gathers what is saved.

    Args:
        trainer: Has not trained yet.

    Returns:
        The layout.

    Raises:
        ValueError: If nothing can be trained under it.
    """
    layout = layout_of(trainer.accelerator)
    if layout.startswith("zero"):
        plugin: Any = trainer.accelerator.state.deepspeed_plugin
        model: Any = trainer.model
        # Whatever the method: a preset can't name them, and a plan takes them so.
        fill_buckets(plugin.deepspeed_config, model)
        # What accelerate does when it prepares the engine, with a warning that one of the two is wrong.
        trainer.accelerator.gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        if layout == "zero3":
            plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return layout


def save_whole_model(trainer: Trainer, folder: Path) -> None:
    """Save the model as a plain checkpoint, whatever it is sharded into. All processes call it, and the first writes.

    Args:
        trainer: Has trained.
        folder: Where to; the same on all processes.
    """
    if layout_of(trainer.accelerator) != "fsdp2":
        trainer.save_model(str(folder))
        return
    # The Trainer would write what each rank holds, unless it was told otherwise before it began.
    model: Any = trainer.model
    gathered = trainer.accelerator.get_state_dict(model)
    if trainer.args.should_save:
        # On CPUs gathered tensors may still be on their way, which a copy waits for.
        whole = {name: value.clone() for name, value in gathered.items()}
        trainer.accelerator.unwrap_model(model).save_pretrained(folder, state_dict=whole)
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(folder)
