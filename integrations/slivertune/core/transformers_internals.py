"""Undocumented interfaces of transformers that the library relies on, in transformers 5.16 to 5.23.

All other modules reach these through this file. `RELIED_ON` lists the place and the use of each, so that a test can
name any that has moved.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime
from functools import lru_cache
from itertools import pairwise
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

RELIED_ON: Mapping[str, str] = {
    "transformers.AutoModelForCausalLM._model_mapping": "which configurations an Auto class has a model of",
    "transformers.PreTrainedModel._from_config": "makes a model of a class without weights",
    "transformers.PreTrainedConfig()._attn_implementation": "the attention that a model was made with",
    "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping": "what a registry has of its own",
    "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping": "what was registered for all registries",
    "transformers.PreTrainedModel#_gradient_checkpointing_func": "checkpoints a block, and is set on each of them",
    "transformers.PreTrainedModel.loss_function": "kept as `_loss_function` where it was set",
    "transformers.TrainingArguments.n_gpu": "kept as `_n_gpu` where it was set",
    "transformers.utils.chat_template_utils._compile_jinja_template": "a chat template's date and generation blocks",
    "transformers.Trainer._run_epoch": "a run that is resumed at its end makes no update",
    "transformers.Trainer._load_from_checkpoint": "sharded weights are read by one process",
    "transformers.Trainer._load_optimizer_and_scheduler": "sharded weights are read by one process",
}
"""Use of each interface, by dotted name. `Class()` is an instance."""
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Characters that Unicode keeps out of texts."""
_BORDER = re.compile(f"([{_BEGIN}{_END}])")


def find_transformers_model(model: nn.Module) -> Any:
    """Return the transformers model (`PreTrainedModel`) that a model is, or holds. None if it holds none."""
    return next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)


def generation_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None
) -> tuple[str, list[tuple[int, int]]]:
    """Render a chat template, and find its `{% generation %}` blocks in the text, in characters.

    Each block is written between two characters that no text has. transformers 5.23
    (`apply_chat_template(return_assistant_tokens_mask=True)`) counts the characters before a block, too few in a macro
    or a variable. It also finds tokens by offsets, which GPT-2's kind of tokenizer cuts at white space.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages: Messages without keys whose value is None.
        tools: JSON schemas of the tools.

    Returns:
        The text, and the start and the end (exclusive) of each block.

    Raises:
        ValueError: If the template changes a block after it was written, so that its position is unknown.
    """

    def write() -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))

    def mark(caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"

    text = write()
    extensions = _compile_jinja_template(tokenizer.get_chat_template(tools=tools)).environment.extensions
    tracker: Any = next(each for each in extensions.values() if "generation" in each.tags)
    # Set on the instance, it comes before the method of its class.
    tracker._generation_support = mark
    try:
        marked = write()
    finally:
        del tracker._generation_support
    here, begins, spans = 0, list[int](), list[tuple[int, int]]()
    parts = _BORDER.split(marked)
    for part in parts:
        if part == _BEGIN:
            begins.append(here)
        elif part == _END and begins:
            spans.append((begins.pop(), here))
        else:
            here += len(part)
    if "".join(parts[::2]) != text or begins:
        raise ValueError("it changes {% generation %} blocks after writing them, so their position is unknown")
    return text, spans


@lru_cache(maxsize=8)
def has_generation_blocks(template: str) -> bool:
    """Return whether a chat template has a `{% generation %}` block that is no comment.

    Args:
        template: The template's text.
    """
    found = _compile_jinja_template(template).environment.lex(template)
    tokens = [(kind, word) for _, kind, word in found if kind != "whitespace"]
    return any(
        kind == "block_begin" and following == ("name", "generation") for (kind, _), following in pairwise(tokens)
    )


def today_in_templates() -> date:
    """Return the date that chat templates write now."""
    return date.fromisoformat(_compile_jinja_template("{{ strftime_now('%Y-%m-%d') }}").render())


@contextmanager
def template_date(template: str, day: date | None) -> Iterator[None]:
    """Let a chat template write one date, whatever the day is.

    Args:
        template: The template's text.
        day: Date that its `strftime_now` formats, at midnight. None leaves it as it is.
    """
    if day is None:
        yield
        return
    # Compiled templates are cached by their text, and look their functions up at each rendering.
    functions: Any = _compile_jinja_template(template).environment.globals
    own, functions["strftime_now"] = functions["strftime_now"], datetime(day.year, day.month, day.day).strftime
    try:
        yield
    finally:
        functions["strftime_now"] = own


def attention_of(config: Any) -> str:
    """Return the name of the attention that a configuration's models use."""
    name: str = config._attn_implementation
    return name


def has_own(registry: Any, name: str) -> bool:
    """Return whether a registry of functions has its own entry, above the entries of all registries."""
    return name in registry._local_mapping


def shared_entry(registry: Any, name: str) -> Any:
    """Return the entry for all registries of this kind. None if there is none."""
    return registry._global_mapping.get(name)


def checkpointing_of(block: nn.Module) -> Callable[..., Any] | None:
    """Return the function that checkpoints a block, called with a forward and its positional arguments, or None.

    Args:
        block: A `GradientCheckpointingLayer`.
    """
    return getattr(block, "_gradient_checkpointing_func", None)


def set_checkpointing(block: nn.Module, function: Callable[..., Any]) -> None:
    """Checkpoint a block by another function.

    Args:
        block: A `GradientCheckpointingLayer`.
        function: Function that is called with a forward and its positional arguments.
    """
    block._gradient_checkpointing_func = function  # type: ignore[assignment]


def forget_own_loss(model: Any) -> None:
    """Let a model have the loss function of its class again, after another one was set."""
    del model._loss_function


def use_one_device(arguments: Any) -> None:
    """Let a Trainer with these arguments train on one device of this process, however many are visible."""
    arguments._n_gpu = 1


def wrap_epoch(trainer: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Override the method of a Trainer that runs an epoch, on this instance.

    Args:
        trainer: The Trainer.
        wrap: Function from the method to its replacement.
    """
    trainer._run_epoch = wrap(trainer._run_epoch)


@contextmanager
def reading_by(
    trainer: Any, *, weights: Callable[..., None], optimizer_and_schedule: Callable[..., None]
) -> Iterator[None]:
    """Let a Trainer that resumes read a checkpoint by these functions inside the block, on this instance.

    Args:
        trainer: The Trainer.
        weights: Function that takes the folder, and maybe the model.
        optimizer_and_schedule: Function that takes the folder, or None.
    """
    own = trainer._load_from_checkpoint, trainer._load_optimizer_and_scheduler
    trainer._load_from_checkpoint, trainer._load_optimizer_and_scheduler = weights, optimizer_and_schedule
    try:
        yield
    finally:
        trainer._load_from_checkpoint, trainer._load_optimizer_and_scheduler = own


def maker_of(model_class: Any, config: Any) -> tuple[Callable[..., Any], bool] | None:
    """Find the function that makes a model of a configuration.

    Args:
        model_class: An Auto class, or a model's own class.
        config: The configuration.

    Returns:
        The function to call with it, and whether the class has a model of it. None if it is no such class.
    """
    if isinstance(model_class, type) and hasattr(model_class, "_model_mapping"):
        auto: Any = model_class
        return auto.from_config, type(config) in auto._model_mapping
    if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
        return model_class._from_config, isinstance(config, model_class.config_class or ())
    return None
