"""Words of `slivertune plan`: the options of `slivertune train`, those of a plan alone, and its questions."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slivertune.core.options import Option, enum_value, options_of
from slivertune.planning.arguments import NAMES_OF_QUESTIONS, OF_CARD, PlanArguments, Sweep
from slivertune.planning.methods import check_options_are_read, planned_methods
from slivertune.planning.optimizers import optimizer_named
from slivertune.planning.request import REQUEST_OPTIONS, PlanRequest, PrecisionName, precision_in_16_bits
from slivertune.training.command_line.parse import build, check_pairs, values_of_preset
from slivertune.training.command_line.plan_help import plan_help
from slivertune.training.methods.method import TrainingMethod
from slivertune.training.methods.registry import TRAIN_METHODS
from slivertune.training.models import Precision, choose_precision
from slivertune.training.options.arguments import ModelArguments, ParkedArguments, RunArguments, TokenArguments
from slivertune.training.options.full_method import without_full
from slivertune.training.options.methods import DEFAULT_METHOD, FULL, METHOD_OPTIONS, method_option
from slivertune.training.options.parser import Verb, given_values
from slivertune.training.options.table import OLD_NAMES, option_named

NAMES_OF_FIELDS = {
    "per_device_train_batch_size": "batch_size",
    "max_length": "seq_length",
}
"""Fields of `PlanRequest` by the options of `slivertune train`, where the two differ."""
IN_PLACE_OF = {"precision": ("bf16", "weights_dtype"), "optimizer": ("optim", "optim_args"), "kernels": ("use_cpu",)}
"""Options of `slivertune train` that set the same as an option of a plan alone."""
WITHOUT_PLAN = (
    *("fp16", "torch_compile", "use_liger_kernel", "neftune_noise_alpha", "label_smoothing_factor"),
    *("auto_find_batch_size", "use_cache", "full_determinism"),
)
"""Options of the Trainer that change a run's memory in ways that a plan does not model."""
_LAYOUTS = ("deepspeed", "fsdp", "fsdp_config")
_OTHER_WORDS = {
    "batch": "batch_size",
    "max_seq_length": "seq_length",
    "fp16": "precision",
    "optimizer_name": "optimizer",
    "lora_r": "lora_rank",
    "checkpointing": "gradient_checkpointing",
    "card": "gpu",
    "gpus": "num_gpus",
    "epochs": "num_train_epochs",
}
"""Names of options elsewhere."""


def plan_options() -> dict[str, Option]:
    """Return the options of `slivertune plan` that `slivertune train` does not have, or has in another way, by name."""
    names = {field: name for name, field in NAMES_OF_FIELDS.items()}
    options = [*options_of(PlanRequest, names), *options_of(PlanArguments, NAMES_OF_QUESTIONS)]
    # A field without a text is declared by `slivertune train`.
    own = {option.name: option for option in options if option.text}
    for name, field in NAMES_OF_FIELDS.items():
        own[name] = replace(own[name], aliases=(field,))
    return {"method": replace(method_option(), choices=(*planned_methods(), FULL), text="Training method."), **own}


def parse_plan_arguments(argv: Sequence[str]) -> PlanArguments:
    """Read the words of `slivertune plan`, or print its help and exit.

    They are checked as `slivertune train` checks them. Typed options win over those of a run file.

    Args:
        argv: Words after `slivertune plan`: an optional run file of `slivertune train`, then options.

    Raises:
        ValueError: If an option is unknown, a value is refused, two contradict each other, or a setting has no plan.
    """
    own = plan_options()
    verb = Verb(name="plan", own=own, other_words=_OTHER_WORDS, help_text=lambda _: plan_help(own))
    written = given_values(argv, verb=verb)
    if written.get("compare") and written.get("method") == FULL:
        raise ValueError(f"--method {FULL} is set by each row of --compare. Leave out one of the two")
    values = without_full(written)
    sweep: Sweep | None = written.get("sweep")
    if sweep is not None:
        # Of the values that `--method full` stands for.
        swept = {sweep.field, *IN_PLACE_OF.get(sweep.field, ())} - written.keys()
        values = {name: value for name, value in values.items() if OLD_NAMES.get(name, name) not in swept}
    has_file, options = bool(argv) and not argv[0].startswith("-"), verb.options()
    words = [word.partition("=")[0].strip("-").replace("-", "_") for word in argv if word.startswith("--")]
    typed = {option.name for word in words if (option := option_named(word, options)) is not None}
    values |= values_of_preset(_method(values), values, argv)
    values.pop("preset", None)
    for name, others in IN_PLACE_OF.items():
        beaten = others if name in typed else (name,) if typed.intersection(others) else ()
        values = {key: each for key, each in values.items() if key in typed or key not in beaten}
    questions, unread = _questions(values, typed)
    if "model_name_or_path" not in values:
        raise ValueError(
            "the following arguments are required: --model. Name a folder with config.json, a hub id, or a model of "
            "slivertune plan --help"
        )
    model = values.pop("model_name_or_path")
    _check(values, questions)
    given, not_read = request_values(values)
    chooses_layers = given.get("layers_per_group") == "auto"
    if chooses_layers:
        del given["layers_per_group"]
    arguments = PlanArguments(
        model=model,
        given=given,
        chooses_layers=chooses_layers,
        fits_card=questions.get("fit_bytes") == OF_CARD,
        unread=tuple(name for name in (*unread, *not_read) if name in written),
        **{name: each for name, each in questions.items() if each != OF_CARD},
    )
    # --compare has a precision for each method, and a search without a run file begins in 16 bits.
    is_decided = arguments.compare or (arguments.searches and not has_file)
    is_swept = sweep is not None and sweep.field == "precision"
    if is_decided or is_swept or "precision" in given:
        return arguments
    following = (name for name in _methods(values, sweep) if _precision({**values, "method": name}).loading == "stored")
    return replace(arguments, follow_checkpoint=frozenset(following))


def request_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Translate options into fields of `PlanRequest`.

    Args:
        values: Values by option.

    Returns:
        Values by field, and the names of the options on which a plan does not depend.

    Raises:
        ValueError: If two options contradict each other, or a plan does not know an optimizer.
    """
    given, unread = dict[str, Any](), list[str]()
    replaced = {other for others in IN_PLACE_OF.values() for other in others}
    for name, value in values.items():
        old_name = OLD_NAMES.get(name, name)
        field = NAMES_OF_FIELDS.get(old_name, old_name)
        if field in REQUEST_OPTIONS and (value != "auto" or name == "layers_per_group"):
            if value is not None:
                given[field] = tuple(value) if isinstance(value, list) else value
        elif name not in replaced:
            unread.append(name)
    dtype = values.get("weights_dtype", "auto")
    if values.get("bf16") or dtype != "auto":
        _set(given, "precision", precision_of(values), values)
    if values.get("optim") is not None:
        _set(given, "optimizer", optimizer_named(enum_value(values["optim"]), values.get("optim_args") or ""), values)
    elif values.get("optim_args") is not None:
        raise ValueError(f"--optim_args {values['optim_args']} takes effect only with --optim. Name the optimizer")
    if values.get("use_cpu"):
        _set(given, "kernels", "cpu", values)
    return given, unread


def precision_of(values: Mapping[str, Any]) -> PrecisionName:
    """Return the precision of a plan that `--bf16` and `--weights_dtype` stand for.

    Args:
        values: Values by option: these two, the method, its masters, 4 bits and the layout. fp32 weights are assumed
            if `slivertune train` would follow the checkpoint.
    """
    chosen = _precision(values)
    if chosen.loading != "bf16":
        return "fp32" if chosen.autocast == "no" else "mixed"
    return precision_in_16_bits(values.get("method", DEFAULT_METHOD.name), values.get("master"))


def _precision(values: Mapping[str, Any]) -> Precision:
    """Return the precision that `slivertune train` chooses."""
    return choose_precision(
        _method(values).bf16_use,
        values.get("weights_dtype", "auto"),
        bf16=values.get("bf16", False),
        fp16=False,
        four_bit=values.get("load_in_4bit", False),
        deepspeed=values.get("layout", "single").startswith("zero"),
    )


def _method(values: Mapping[str, Any]) -> type[TrainingMethod]:
    return TRAIN_METHODS.get(values.get("method", DEFAULT_METHOD.name), TrainingMethod)


def _methods(values: Mapping[str, Any], sweep: Sweep | None) -> set[str]:
    """Return the methods that are planned: the one of the run, or those of a sweep."""
    if sweep is not None and sweep.field == "method":
        return {*sweep.values}
    return {values.get("method", DEFAULT_METHOD.name)}


def _questions(values: dict[str, Any], typed: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Take the questions out of the values, by field of `PlanArguments`. Return also options that are then unread."""
    unread = []
    if "tokens" not in values and "num_train_epochs" in values and "num_train_epochs" not in typed:
        del values["num_train_epochs"]
        unread.append("num_train_epochs")
    fields = {option: field for field, option in NAMES_OF_QUESTIONS.items() if option is not None}
    own = {option.name for option in options_of(PlanArguments, NAMES_OF_QUESTIONS)}
    return {fields.get(name, name): values.pop(name) for name in [*values] if name in own}, unread


def _check(values: Mapping[str, Any], questions: Mapping[str, Any]) -> None:
    """Refuse what `slivertune train` refuses, by the same sentence, and settings that have no plan."""
    method = _method(values)
    for name in (*WITHOUT_PLAN, *method.not_planned):
        if values.get(name):
            raise ValueError(f"{name} {values[name]} has no plan, and changes the memory of a run. Leave it out here")
    for name in _LAYOUTS:
        if values.get(name) and "layout" not in values:
            raise ValueError(
                f"{name} {values[name]} distributes the run. Say how, for example by --layout zero2 --num_gpus 2"
            )
    if values.get("keep_activations") == "auto":
        raise ValueError("keep_activations auto fills the memory that the device has left. Give a number for the plan")
    sweep: Sweep | None = questions.get("sweep")
    sweeps_methods = sweep is not None and sweep.field == "method"
    if "bf16" in values and (questions.get("compare") or sweeps_methods):
        raise ValueError(
            f"--bf16 {str(values['bf16']).lower()} means another precision for each method. Leave it out with "
            "--compare, which plans each method as slivertune train --bf16 does. Give --precision with --sweep "
            "method=..."
        )
    methods = {*planned_methods()} if questions.get("compare") else _methods(values, sweep)
    own = {
        name: [option.name for option in each.options() if option.name not in NAMES_OF_QUESTIONS]
        for name, each in METHOD_OPTIONS.items()
    }
    check_options_are_read(methods, {*values, *(() if sweep is None else (sweep.field,))}, own)
    # A plan writes no files, so that it needs no folder for them.
    folder = {"state_dir": "."} if values.get("state") == "disk" else {}
    for name in methods & METHOD_OPTIONS.keys():
        METHOD_OPTIONS[name].make({**folder, **values})
    for kind in (RunArguments, TokenArguments, ModelArguments, ParkedArguments):
        build(kind, values)
    check_pairs(values)


def _set(given: dict[str, Any], name: str, value: str, values: Mapping[str, Any]) -> None:
    """Set a field, unless it is set to another value."""
    if given.get(name, value) != value:
        words = [f"--{each} {_typed(values[each])}" for each in IN_PLACE_OF[name] if each in values]
        raise ValueError(
            f"{' '.join(words)} means --{name} {value} here, and --{name} {given[name]} says otherwise. Leave out one "
            "of the two"
        )
    given[name] = value


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else enum_value(value)
