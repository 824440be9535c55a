"""Ends a run of `slivertune train` whose evaluations stop improving."""

from collections.abc import Callable
from typing import Any

from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy


class EarlyStopping(EarlyStoppingCallback):
    """transformers' callback, which also restores its count in a resumed run and says when it ends a run.

    Args:
        patience: Evaluations in a row without a better metric after which training ends.
        say: Function that shows a line to the user.
    """

    def __init__(self, patience: int, say: Callable[[str], None]) -> None:
        super().__init__(early_stopping_patience=patience)
        self._say = say
        self._is_training = False
        self.has_stopped = False
        """Whether this callback has ended the run."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the count of a resumed run. The patience is this run's."""
        super().on_train_begin(args, state, control, **kwargs)  # type: ignore[no-untyped-call]
        callbacks: Any = state.stateful_callbacks or {}
        saved = callbacks.get(type(self).__name__)
        if state.global_step and isinstance(saved, dict):
            count = saved.get("attributes", {}).get("early_stopping_patience_counter", 0)
            self.early_stopping_patience_counter = count
        self._is_training = True

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any = None,
        **kwargs: Any,
    ) -> None:
        """Judge an evaluation during training. Evaluations before and after it do not count."""
        if not self._is_training:
            return
        super().on_evaluate(args, state, control, metrics, **kwargs)  # type: ignore[no-untyped-call]
        if self.early_stopping_patience_counter >= self.early_stopping_patience and not self.has_stopped:
            self.has_stopped = True
            best = "" if state.best_metric is None else f" than {state.best_metric:.4f}"
            where = "" if state.best_model_checkpoint is None else f", of {state.best_model_checkpoint}"
            self._say(
                f"stopping early at step {state.global_step}: {args.metric_for_best_model} was no better{best}{where} "
                f"in {self.early_stopping_patience} evaluations"
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop judging evaluations."""
        self._is_training = False


def check_early_stopping(patience: int | None, training: TrainingArguments) -> None:
    """Refuse early stopping without evaluations or a metric.

    Args:
        patience: Patience as for `EarlyStopping`; None disables early stopping.
        training: Arguments of the Trainer.

    Raises:
        ValueError: If there are no evaluations, or no metric is named.
    """
    if patience is None:
        return
    asked = f"--early_stopping_patience {patience}"
    if training.eval_strategy == IntervalStrategy.NO:
        raise ValueError(
            f"{asked} needs evaluations while training. Give --eval_strategy steps with --eval_steps N, or "
            "--eval_strategy epoch"
        )
    if training.metric_for_best_model is None:
        raise ValueError(
            f"{asked} needs a metric to watch. Give --load_best_model_at_end true, which watches the evaluation loss "
            "and ends with the best model (it needs the same --save_strategy as --eval_strategy), or "
            "--metric_for_best_model eval_loss to end with the last one"
        )


def check_best_metric(training: TrainingArguments, metrics: dict[str, float]) -> None:
    """Refuse a metric that no evaluation reports, before anything is trained.

    Args:
        training: Arguments of the Trainer.
        metrics: Metrics of the first evaluation.

    Raises:
        ValueError: If the metric is missing; names the available ones.
    """
    asked = training.metric_for_best_model
    if asked is not None and f"eval_{asked.removeprefix('eval_')}" not in metrics:
        known = [name for name in ("eval_loss", "eval_accuracy") if name in metrics]
        raise ValueError(f"--metric_for_best_model {asked} is no metric of the evaluation. Use {' or '.join(known)}")
