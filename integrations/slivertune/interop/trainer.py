"""`slivertune.attach`: HiFT, SFT and TokenTune under a stock Trainer, which keeps its loop and its checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import Trainer

from slivertune.core.sliver import Sliver
from slivertune.hift import HiFTConfig
from slivertune.interop.checkpoints import (
    KeepManifest,
    KeepState,
    KeepTokens,
    keep_manifest_last,
    resuming,
    stop_at_the_end,
)
from slivertune.interop.compilation import BlockCompilation
from slivertune.interop.kbit_note import cost_of_fp32
from slivertune.interop.loss_weights import KeepLossWeights, load_loss_weights, loss_weights, with_loss
from slivertune.interop.losses import attach_tokens
from slivertune.interop.methods import AtStart, method_of
from slivertune.interop.optim_args import set_passed_over
from slivertune.interop.training_metrics import metrics_of
from slivertune.interop.unsupported import check_has_no_optimizer, check_trainer, check_unchanged, read_arguments
from slivertune.parallel.consistency.explain import explain
from slivertune.parallel.layout import layout_of
from slivertune.parallel.prepare import prepare
from slivertune.sft import SFTConfig
from slivertune.tokentune import TokenTune, TokenTuneHandle

Setting: TypeAlias = HiFTConfig | SFTConfig | TokenTune


class Attachment:
    """Connection of a Trainer with a method, a token selection or both, made by `attach`.

    Args:
        trainer: A Trainer that has not trained yet; its `train` is wrapped on this instance.
        config: Settings of HiFT or SFT, if one of them trains.
        tune: The token selection, if there is one.
        momentum: Momentum of SM3.
    """

    def __init__(
        self, trainer: Trainer, config: HiFTConfig | SFTConfig | None, tune: TokenTune | None, momentum: float
    ) -> None:
        self.trainer = trainer
        self._config = config
        self._method = method_of(config)
        self._tune = tune
        self._momentum = momentum
        self.optimizer: Any = None
        """HiFT or SFT, built over the model. None if only TokenTune was attached."""
        self.tokens: TokenTuneHandle | None = None
        """The token selection, or None if there is none. Each training makes a new one, which continues the last."""
        self._is_at_rest = False
        """Whether the token selection is off the model, between two trainings."""
        self._model: nn.Module | None = None
        self._made_with: dict[str, Any] = {}
        """The Trainer's arguments that the optimizer was made with."""
        self._trained: Any = None
        """The Trainer's model at the end of the last training, or at `attach`."""
        self._is_detached = False
        self.checkpoint: Path | None = None
        """Checkpoint that the current run continues from."""
        # With HiFT or a token selection, blocks are compiled whole or not at all.
        strict = isinstance(config, HiFTConfig) or tune is not None
        self._compilation = BlockCompilation(trainer, fullgraph=strict)
        # The user's own choice of a base optimizer, if any.
        self._base_class_and_kwargs = trainer.optimizer_cls_and_kwargs
        train: Callable[..., Any] = trainer.train

        @wraps(train)
        def train_attached(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            self._check()
            try:
                self._begin()
                with resuming(trainer, resume_from_checkpoint, needs_manifest=config is not None) as self.checkpoint:
                    if config is not None and self.checkpoint is not None:
                        load_loss_weights(trainer, self.checkpoint)
                    return train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self._end()

        trainer.train = train_attached  # type: ignore[method-assign]
        stop_at_the_end(trainer)

    def detach(self) -> None:
        """Detach everything from the model, for good. Trained weights stay."""
        self._is_detached = True
        self.take_off()

    def take_off(self) -> None:
        """Take everything off the model, such as after an error of `attach`."""
        if self.tokens is not None:
            self.tokens.remove()
        if self.optimizer is not None:
            self.optimizer.detach()

    def _check(self) -> None:
        """Refuse a training of something else than what was attached.

        Raises:
            RuntimeError: If it was detached, or the model or the arguments of the Trainer were changed.
        """
        if self._is_detached:
            raise RuntimeError(
                "what slivertune.attach had attached was detached from this Trainer, which can't train without it. "
                "Make a new Trainer, and attach to that if not all weights are to be trained"
            )
        if not self._makes_own_model:
            check_unchanged(self.trainer, self._trained, self._made_with)

    @property
    def _makes_own_model(self) -> bool:
        """Whether each training makes its own model."""
        return self.trainer.model_init is not None or self._model is None

    def _begin(self) -> None:
        """Attach to the model again, after the end of an earlier training."""
        self._compilation.begin()
        if self._makes_own_model:
            return
        if self._method is not None:
            self._method.begin(self.optimizer)
        self.put_on_tokens()

    def put_on_tokens(self) -> None:
        """Put the token selection on the model, if it is off. Its draws go on."""
        if self._tune is not None and self.tokens is not None and self._is_at_rest:
            state = self.tokens.state_dict()
            self.tokens = attach_tokens(self.trainer, self._tune, self._model)
            self.tokens.load_state_dict(state)
            self._is_at_rest = False

    def rest(self) -> None:
        """Keep the token selection off the model until a training begins, and expect the model that is there now."""
        self._trained = self.trainer.model
        if self.tokens is not None:
            self.tokens.remove()
            self._is_at_rest = True

    def _end(self) -> None:
        """Detach from the model after a training, even a failed one: nothing stays frozen or hooked."""
        self._compilation.end()
        self.rest()
        if self._method is not None and self.optimizer is not None:
            self._method.end(self.optimizer)

    def build(self, model: nn.Module) -> Any:
        """Apply the settings to a model, unless they are applied already.

        Args:
            model: The Trainer's model; `model_init` makes a new one for every training.

        Returns:
            The optimizer.

        Raises:
            ValueError: If the settings don't fit the model.
        """
        if model is self._model:
            return self.optimizer
        self.take_off()
        self._model = None
        self._made_with = read_arguments(self.trainer) if self._method is not None else {}
        if self._method is not None:
            trained = with_loss(self.trainer, model)
            if trained is not model:
                self._method.check_loss_weights(self._config, tuple(loss_weights(self.trainer, model)))
            with self._own_optimizer_class():
                config = self._method.settle(self.trainer, model, self._config, self._tune)
            self.optimizer = self._method.make(
                self.trainer, trained, config, momentum=self._momentum, make_base=self._make_base
            )
        # After SFT: TokenTune wraps the current forward of a layer, and SFT's layer form replaces that forward.
        if self._tune is not None:
            self.tokens = attach_tokens(self.trainer, self._tune, model)
            self._is_at_rest = False
        self._compilation.compile(model)
        self._model = model
        return self.optimizer

    def load_best(self, checkpoint: Path) -> None:
        """Load the state that belongs to the best model's weights, which the Trainer has just loaded. A collective.

        Args:
            checkpoint: Checkpoint of the best model.
        """
        if self._method is not None and self.optimizer is not None:
            self._method.load_best(self.optimizer, checkpoint)

    def save_beside(self, folder: Path) -> None:
        """Save what `trainer.save_model` leaves out. A collective.

        Args:
            folder: Folder of the saved model.
        """
        if self._method is not None and self.optimizer is not None:
            self._method.save_beside(self.optimizer, folder, getattr(self._model, "name_or_path", None) or None)

    def _make_base(self) -> Any:
        """Make the Trainer's own optimizer, with its class and its rules for weight decay."""
        try:
            with self._own_optimizer_class():
                made = self.trainer.create_optimizer()
            set_passed_over(made, self.trainer.args.optim_args)
            return made
        finally:
            self.trainer.optimizer = None

    @contextmanager
    def _own_optimizer_class(self) -> Iterator[None]:
        """Give the Trainer back the optimizer class that its user chose, if any, in the block."""
        trainer = self.trainer
        ours, trainer.optimizer_cls_and_kwargs = trainer.optimizer_cls_and_kwargs, self._base_class_and_kwargs
        try:
            yield
        finally:
            trainer.optimizer_cls_and_kwargs = ours

    def current_tokens(self) -> TokenTuneHandle:
        """Return the selection on the model in use. With `model_init`, build it first, since no other call does."""
        model: Any = self.trainer.model
        if self.trainer.model_init is not None:
            self.build(model)
        assert self.tokens is not None
        return self.tokens


class SliverFactory:
    """Makes the optimizer when the Trainer asks for it through `optimizer_cls_and_kwargs`."""

    def __call__(self, model: nn.Module, arguments: Any = None, *, attachment: Attachment) -> Any:
        """Apply the settings to the model.

        Args:
            model: The Trainer's model.
            arguments: The Trainer's arguments, which axolotl's Trainer passes, too; not read.
            attachment: Attachment with the settings.

        Returns:
            The optimizer.
        """
        return attachment.build(model)


def attach(trainer: Trainer, *settings: Setting, momentum: float = 0.0) -> Attachment:
    """Train a sliver of the model under a stock Trainer, or a subclass of it.

    Call it before `trainer.train()`, on every rank. The Trainer makes HiFT's base optimizer from its own arguments,
    with its own class and rules for weight decay. SFT takes learning rate and weight decay from them, and betas and
    epsilon if it trains by AdamW. Schedule, clipping, accumulation, evaluation, checkpoints and resuming stay the
    Trainer's. Under DDP, FSDP2 and ZeRO, only this Trainer's Accelerator prepares by `slivertune.prepare`.

    When `trainer.train()` ends, even by an error, HiFT and the token selection are detached: every parameter requires a
    gradient as before, and forwards see all tokens. Another `trainer.train()` attaches them again and continues.

    Args:
        trainer: A Trainer without an optimizer; its model is on the device that the Trainer has chosen.
        *settings: A `HiFTConfig` or a `SFTConfig`, a `TokenTune`, or one of the former with the latter.
        momentum: Momentum of SM3; only with `SFTConfig(selection="momentum")`.

    Returns:
        An attachment with the optimizer and the token selection; its `detach` removes both from the model.

    Raises:
        RuntimeError: If the Trainer already has an optimizer, or makes its optimizer in its own way.
        ValueError: If the settings don't go together, or don't fit the model, the Trainer's arguments or the layout.
        TypeError: If an argument is no setting.

    Example:
        >>> slivertune.attach(trainer, slivertune.HiFTConfig(), slivertune.TokenTune(ratio=0.3))
        >>> trainer.train()
    """
    config, tune = _sort(settings)
    if momentum and not isinstance(config, SFTConfig):
        raise ValueError(
            f"momentum={momentum:g} is that of SM3 under SFT, which does not train here. Leave it out; the Trainer's "
            "optim_args set another optimizer's"
        )
    check_trainer(trainer)
    attachment = Attachment(trainer, config, tune, momentum)
    model: Any = trainer.model
    cost = cost_of_fp32(model)
    if cost is not None and trainer.is_world_process_zero():
        print(cost)
    method = method_of(config)
    if method is None:
        attachment.build(model)
    else:
        check_has_no_optimizer(trainer, method.name)
        method.check(config, trainer.args)
        metrics_of(trainer).watch(lambda: attachment.optimizer)
        trainer.add_callback(KeepState(attachment))
        trainer.add_callback(KeepLossWeights(trainer))
        trainer.add_callback(AtStart(method, lambda: attachment.optimizer))
        _prepare_by_slivertune(trainer.accelerator)
        explain(trainer, "_save_checkpoint", "saving a checkpoint")
        explain(trainer, "save_model", "saving the model")
        _let_make(trainer, attachment)
        _save_beside(trainer, attachment)
    if tune is not None:
        metrics_of(trainer)
        trainer.add_callback(KeepTokens(attachment))
    if trainer.model_init is None:
        attachment.rest()
    keep_manifest_last(trainer, KeepManifest())
    return attachment


def _sort(settings: tuple[Setting, ...]) -> tuple[HiFTConfig | SFTConfig | None, TokenTune | None]:
    methods: list[Any] = [each for each in settings if method_of(each) is not None]
    tunes = [each for each in settings if isinstance(each, TokenTune)]
    if len(methods) + len(tunes) != len(settings):
        raise TypeError(f"{settings!r} are not all settings. Pass a HiFTConfig, a SFTConfig or a TokenTune")
    if not settings or len(methods) > 1 or len(tunes) > 1:
        names = ", ".join(type(each).__name__ for each in settings) or "nothing"
        raise ValueError(
            f"{names} can't be attached. Pass one HiFTConfig or one SFTConfig, one TokenTune, or one of the former "
            "with the latter"
        )
    return methods[0] if methods else None, tunes[0] if tunes else None


def _let_make(trainer: Trainer, attachment: Attachment) -> None:
    """Let the Trainer make the optimizer now, so that errors appear at once."""
    theirs = trainer.optimizer_cls_and_kwargs
    trainer.optimizer_cls_and_kwargs = (SliverFactory, {"attachment": attachment})  # type: ignore[assignment]
    try:
        made = trainer.create_optimizer()
    except BaseException:
        attachment.take_off()
        trainer.optimizer, trainer.optimizer_cls_and_kwargs = None, theirs
        raise
    if made is not attachment.optimizer or made is None:
        raise RuntimeError(
            f"{type(trainer).__name__} builds its optimizer by itself, without optimizer_cls_and_kwargs. Build the "
            "optimizer yourself (HiFT.wrap(optimizer, model)), and give it to the Trainer as optimizers=(it, None)"
        )


def _save_beside(trainer: Trainer, attachment: Attachment) -> None:
    """Let `trainer.save_model` save the deltas beside a model whose weights do not hold them."""
    save: Callable[..., None] = trainer.save_model

    @wraps(save)
    def save_model(output_dir: str | None = None, _internal_call: bool = False) -> None:
        save(output_dir, _internal_call)
        if not _internal_call:  # a checkpoint has the optimizer's state
            attachment.save_beside(Path(output_dir or str(trainer.args.output_dir)))

    trainer.save_model = save_model  # type: ignore[method-assign]


def _prepare_by_slivertune(accelerator: Any) -> None:
    """Let this Accelerator prepare our optimizers by `slivertune.prepare`, which calls its original `prepare`."""
    own_prepare = accelerator.prepare
    is_inside = False

    def prepare_by_layout(*objects: Any, **options: Any) -> Any:
        nonlocal is_inside
        slivers = [each for each in objects if isinstance(each, Sliver)]
        kept = _prepared_before(accelerator, objects)
        if kept and not is_inside:
            return tuple(each if id(each) in kept else own_prepare(each, **options) for each in objects)
        if is_inside or not slivers:
            return own_prepare(*objects, **options)
        if options:
            raise ValueError(f"{options} has no effect on {type(slivers[0]).__name__}'s training. Leave it out")
        is_inside = True
        try:
            return prepare(accelerator, *objects)
        finally:
            is_inside = False

    accelerator.prepare = prepare_by_layout


def _prepared_before(accelerator: Any, objects: tuple[Any, ...]) -> set[int]:
    """Return the identities of an optimizer and its model under DDP that an earlier training has prepared.

    Accelerate would wrap the model in DDP now, or mark it as prepared for good.
    """
    optimizers = [each for each in objects if isinstance(each, AcceleratedOptimizer)]
    if layout_of(accelerator) != "ddp" or not any(isinstance(each.optimizer, Sliver) for each in optimizers):
        return set()
    return {id(each) for each in (*optimizers, *objects) if isinstance(each, AcceleratedOptimizer | nn.Module)}
