"""Values that options take."""

from slivertune.core.options import Option

_VALUES = {
    "state": "disk",
    "gradients": "host",
    "waiting": "nf4",
    "weights": "host",
    "selection": "momentum",
    "master": "fp32",
    "inactive": "frozen",
    "sft_momentum": "0.5",
    "lora_dropout": "0.5",
    "reselection_interval": "20",
    "state_ram_bytes": "0",
    "device_bytes": "1GiB",
    "resident_bytes": "0",
    "layers_per_group": "3",
    "keep_activations": "1",
    "report_to": "none",
    "chat_template_date": "2026-01-31",
    "optim": "sgd",
}


def value_of(option: Option) -> str:
    """Return the text of a value that an option takes by itself."""
    if option.name in _VALUES:
        return _VALUES[option.name]
    if option.is_switch:
        return "true"
    if option.choices:
        return option.choices[-1]
    if option.takes_mapping:
        return "{}"
    if {int, float}.intersection((*option.kinds, option.item_kind)):
        return "1"
    return "64MiB" if option.value_name is not None and "SIZE" in option.value_name else "x"
