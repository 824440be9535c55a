"""Tasks that `slivertune train --task` takes, including those of other packages."""

TASK_OPTIONS: dict[str, frozenset[str]] = {
    "causal_lm": frozenset(
        (
            "text_column",
            "prompt_column",
            "response_column",
            "response_separator",
            "packing",
            "dataset_weights",
            "dataset_format",
            "chat_template",
            "chat_template_date",
        )
    ),
    "classification": frozenset(("text_column", "text_pair_column", "label_column")),
    "prompt_classification": frozenset(("label_column", "template", "label_words")),
}
"""Name of a task -> options of `DataArguments` that it reads and that not every task reads."""


def tasks_reading(option: str) -> list[str]:
    """Return the tasks that read an option, or an empty list for an option that every task reads.

    Args:
        option: Name of a field of `DataArguments`.
    """
    return [task for task, options in TASK_OPTIONS.items() if option in options]
