"""The tasks that `slivertune train --task` takes, those of other packages among them."""

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
"""By the name that is typed: the options of `DataArguments` that it reads, and that not every task does."""


def tasks_reading(option: str) -> list[str]:
    """The tasks that read an option which not every task reads; none for one that all do.

    Args:
        option: Name of a field of `DataArguments`.
    """
    return [task for task, options in TASK_OPTIONS.items() if option in options]
