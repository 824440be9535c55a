"""The Trainer's options that people set, as `slivertune train --help` shows them. It imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from slivertune.core.options import Spelling


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonOptions:
    """Fields of `transformers.TrainingArguments`, with its defaults and help texts of our own."""

    learning_rate: float = 5e-5
    """Peak learning rate of the schedule."""
    num_train_epochs: float = 3.0
    """Passes over the training data."""
    max_steps: int = -1
    """Number of updates, in place of epochs."""
    per_device_train_batch_size: int = 8
    """Rows per forward on each device."""
    gradient_accumulation_steps: int = 1
    """Forwards and backwards per update."""
    warmup_steps: float = 0
    """Warmup updates. A value below 1 is their share of all updates."""
    lr_scheduler_type: str = "linear"
    """Schedule of the learning rate: linear, cosine, constant, constant_with_warmup, ..."""
    optim: str = "adamw_torch_fused"
    """Optimizer of dense, hift and lora: adamw_torch, sgd, adafactor, adamw_bnb_8bit, ..."""
    weight_decay: float = 0.0
    """Weight decay of all weights except norms and biases."""
    max_grad_norm: float = 1.0
    """Maximum norm to which gradients are clipped. 0 turns clipping off."""
    seed: int = 42
    """Seed of the data order, dropout and all other random choices."""
    bf16: bool = False
    """Train in bfloat16. See --weights_dtype for its effect on each method."""
    gradient_checkpointing: bool | None = None
    """Store only each block's input, and recompute the block in the backward."""
    output_dir: str | None = None
    """Folder of the run. By default runs/METHOD, or the first free one of runs/METHOD-2, -3, and so on. Its
    slivertune_run.yaml repeats the run."""
    resume_from_checkpoint: str | None = None
    """Checkpoint folder to continue from. true takes the newest complete checkpoint. auto also takes it, or begins a
    new run if there is none, so that one command both starts a run and continues it after a kill, in the same folder
    (by default the newest of runs/METHOD). A finished run continues if max_steps or num_train_epochs was raised.
    Otherwise nothing is trained, and a line says so."""
    logging_strategy: Literal["no", "steps", "epoch"] = "steps"
    """Schedule of log lines."""
    logging_steps: float = 500
    """Updates between two log lines. By default as said below (HiFT: a turn)."""
    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    """Schedule of evaluations, besides those before and after training."""
    eval_steps: float | None = None
    """Updates between two evaluations. By default logging_steps."""
    per_device_eval_batch_size: int = 8
    """Rows per forward of an evaluation."""
    save_strategy: Literal["no", "steps", "epoch", "best"] = "steps"
    """Schedule of checkpoints."""
    save_steps: float = 500
    """Updates between two checkpoints."""
    save_total_limit: int | None = None
    """Checkpoints to keep. By default all."""
    report_to: Annotated[str, Spelling(value_name="NAME ...")] = "none"
    """Trackers that receive the log: tensorboard, wandb, ..., all."""
