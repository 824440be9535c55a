"""Rules for the values of `slivertune train`'s options, checked during parsing, before anything is loaded."""

import json
import re
from typing import Any

from transformers import TrainingArguments

from slivertune.core.number_rule import ABOVE_ZERO, ANY, COUNT, FROM_ZERO, RULES, SHARE, NumberRule
from slivertune.core.options import Option

_MANY_DIGITS = re.compile(r"\d{400,}")
"""Pattern of a number with more digits than any float has."""


_SEED = NumberRule(0, 2**32 - 1)
_RULES = {
    **RULES,
    **dict.fromkeys(("per_device_eval_batch_size", "eval_accumulation_steps", "torch_empty_cache_steps"), COUNT),
    **dict.fromkeys(("dataloader_prefetch_factor", "ddp_bucket_cap_mb", "ddp_timeout"), COUNT),
    **dict.fromkeys(("warmup_steps", "max_grad_norm", "neftune_noise_alpha", "eval_delay"), FROM_ZERO),
    "dataloader_num_workers": FROM_ZERO,
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps", "dataset_weights"), ABOVE_ZERO),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), SHARE),
    **dict.fromkeys(("seed", "data_seed"), _SEED),
    "max_steps": NumberRule(1, FROM_ZERO.most, instead=-1),
    "local_rank": NumberRule(0, FROM_ZERO.most, instead=-1),
    # SGD may have a learning rate above 1, but no optimizer works with one of hundreds.
    "learning_rate": NumberRule(0, 100),
    "weight_decay": NumberRule(0, 100),
    "adam_epsilon": NumberRule(0, 1),
}
"""Rules of the Trainer's arguments, and of our arguments that would otherwise be checked only with the data."""


_MAY_BE_EMPTY = frozenset(("sample_prompt", "response_separator", "template", "optim_args", "debug", "fsdp"))
"""Options whose empty text has a meaning or is refused elsewhere. An empty path would be the working directory."""


def number_rule(option: Option) -> NumberRule | None:
    """Find the rule of an option.

    Args:
        option: Option of `slivertune train`.

    Returns:
        The rule; None if the option takes no numbers.
    """
    kinds = (*option.kinds, option.item_kind)
    if option.is_switch or str in option.kinds or not {int, float}.intersection(kinds):
        return None
    return _RULES.get(option.name, FROM_ZERO if option.owner is TrainingArguments else ANY)


def check_number(option: Option, value: Any, typed: str) -> None:
    """Refuse a number that an option does not take.

    Args:
        option: Option of `slivertune train`.
        value: Parsed value: a number, a list of numbers, or anything else that the option takes.
        typed: Name of the option as it was typed.

    Raises:
        ValueError: If the rule does not allow a number; names the option, the value and the rule.
    """
    rule = number_rule(option)
    for each in value if isinstance(value, list) else [value]:
        if rule is not None and isinstance(each, int | float) and not rule.allows(each):
            raise ValueError(f"--{typed} {each} must be {rule.describe()}")


def check_text(option: Option, value: Any) -> None:
    """Refuse an empty text if an option needs a name, and arguments of an optimizer that are no pairs.

    Args:
        option: Option of `slivertune train`.
        value: Parsed value: a text, or a list of texts.

    Raises:
        ValueError: If a text is empty or has no pairs; names the option and the way out.
    """
    if option.name == "optim_args" and value and any(pair.count("=") != 1 for pair in value.split(",")):
        raise ValueError(f"--optim_args {value!r} must be pairs with commas between them, such as rank=64,scale=0.5")
    is_empty = "" in value if isinstance(value, list) else value == ""
    if is_empty and option.name not in _MAY_BE_EMPTY:
        raise ValueError(f"--{option.name} '' is empty. Give a value, or leave it out")


def check_mapping(option: Option, value: Any) -> None:
    """Refuse a text that is not the mapping which an option takes, and mappings with overlong numbers.

    Args:
        option: Option of `slivertune train`.
        value: Parsed value: JSON, a mapping of a config file, or the path of a file if the option takes one.

    Raises:
        ValueError: If the value is refused; names the option, the value and the rule.
    """
    if not option.takes_mapping:
        return
    if _MANY_DIGITS.search(str(value)):
        raise ValueError(f"--{option.name} {value} has a number with too many digits. Give a smaller one")
    is_path = str in option.kinds and not option.name.endswith("_kwargs")
    if not isinstance(value, str) or (is_path and not value.startswith("{")):
        return
    rule = f'--{option.name} {value!r} must be a JSON mapping, such as {{"name": 1}}'
    try:
        is_mapping = isinstance(json.loads(value), dict)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{rule}: {error}") from error
    if not is_mapping:
        raise ValueError(rule)
