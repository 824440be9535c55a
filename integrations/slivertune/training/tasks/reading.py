"""Choice between a chat template and plain text for the rows of a format."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from transformers import PreTrainedTokenizerBase

from slivertune.core.transformers_internals import today_in_templates
from slivertune.training.data.formats import DatasetFormat, unread_columns, unread_keys
from slivertune.training.options.arguments import DataArguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Format of the rows, and whether a chat template renders them."""

    format: DatasetFormat
    uses_template: bool

    @property
    def uses_separator(self) -> bool:
        """Whether a separator stands between prompt and response."""
        return not self.uses_template and self.format.name not in ("text", "alpaca")

    def describe(self, rows: Any, template: str) -> str:
        """Describe the rows in one line, for the first lines of a run.

        Args:
            rows: A `datasets.Dataset`. The line names its columns and keys of messages that are not read.
            template: Source of the chat template; any text if there is none.
        """
        found = self.format
        how = ""
        if not found.is_chat and found.name != "text":
            how = ", written by the chat template" if self.uses_template else ""
            if found.is_instruction and not self.uses_template:
                kind = "the Alpaca prompt" if found.name == "alpaca" else "plain text"
                how = f", written as {kind} since the tokenizer has no chat template"
        loss = {"text": "all tokens", "assistant": "the assistant's turns"}.get(found.target, f"the {found.target}")
        unread = unread_columns(found, rows)
        unread += [f"{key} of a message" for key in unread_keys(found, rows, template)]
        rest = f"; not read: {', '.join(unread)}" if unread else ""
        return f"read as {found}{how}; loss on {loss}{rest}"


def choose_reading(args: DataArguments, tokenizer: PreTrainedTokenizerBase, found: DatasetFormat) -> Reading:
    """Choose whether a chat template renders the rows.

    If there is a template, it renders chats and instruction data. Columns that the user named are read as plain text,
    unless the user also named a template.

    Args:
        args: Settings that may name a chat template.
        tokenizer: Tokenizer with the template, if there is one.
        found: Format of the rows.

    Raises:
        ValueError: If rows are chats and there is no template, or if none of several templates is the default.
    """
    has_template = bool(tokenizer.chat_template)
    if found.is_chat and not has_template:
        raise ValueError(
            f"the rows are {found}, and the tokenizer has no chat template to write them with. Name one by "
            "--chat_template (a Jinja file, or the template itself), or use a model whose tokenizer has one"
        )
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        names = ", ".join(tokenizer.chat_template)
        raise ValueError(
            f"the tokenizer has the chat templates {names} and none called default. Name the one to use by "
            "--chat_template (a Jinja file, or the template itself)"
        )
    if found.name == "prompt_response":
        return Reading(format=found, uses_template=args.chat_template is not None)
    uses_template = found.name != "text" and has_template
    if not uses_template or not (found.is_chat or re.search(r"\btools\b", str(tokenizer.chat_template))):
        # Only a template writes what the assistant may call. A chat whose tools it leaves out is dropped.
        found = replace(found, optional=tuple(name for name in found.optional if name != "tools"))
    return Reading(format=found, uses_template=uses_template)


def template_day(asked: str | None, tokenizer: PreTrainedTokenizerBase, readings: Iterable[Reading]) -> date | None:
    """Choose the date that a chat template writes.

    Args:
        asked: Value of `--chat_template_date`; None for today.
        tokenizer: Tokenizer with the template, if there is one.
        readings: Readings of all datasets.

    Returns:
        The date, or None if no dataset is rendered by a template that writes the current date.
    """
    is_written = any(reading.uses_template for reading in readings)
    if not is_written or not re.search(r"\bstrftime_now\b", str(tokenizer.chat_template)):
        return None
    return today_in_templates() if asked is None else date.fromisoformat(asked)


def check_settings_are_read(args: DataArguments, readings: Iterable[Reading]) -> None:
    """Reject settings that no dataset reads.

    Args:
        args: The settings.
        readings: Readings of all datasets.

    Raises:
        ValueError: If a chat template or a separator was given and no dataset uses it.
    """
    readings = list(readings)
    formats = " and ".join(str(reading.format) for reading in readings)
    if args.chat_template is not None and not any(reading.uses_template for reading in readings):
        raise ValueError(
            f"chat_template={args.chat_template!r} writes chats and instructions, and the rows are {formats}. Leave "
            "it out"
        )
    separator = DataArguments().response_separator
    if args.response_separator != separator and not any(reading.uses_separator for reading in readings):
        raise ValueError(
            f"response_separator={args.response_separator!r} stands between prompts and responses in plain text, and "
            f"the rows are {formats}{' by a chat template' if any(each.uses_template for each in readings) else ''}. "
            "Leave it out"
        )
