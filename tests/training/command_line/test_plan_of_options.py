"""Every option of `slivertune train` is a plan's under the same name, or stands here with its reason."""

from itertools import product

import pytest

from slivertune.core.options import Option
from slivertune.planning.methods import planned_methods
from slivertune.planning.request import REQUEST_OPTIONS
from slivertune.training.command_line.plan_words import IN_PLACE_OF, NAMES_OF_FIELDS, parse_plan_arguments, plan_options
from slivertune.training.methods.registry import TRAIN_METHODS, check_method
from slivertune.training.options.methods import METHOD_OPTIONS
from slivertune.training.options.parser import make_parser as make_train_parser
from slivertune.training.options.table import RENAMED
from slivertune.training.options.trainer import CommonOptions
from slivertune.training.tasks.tokenization import DEFAULT_MAX_LENGTH
from tests.training.command_line.values import value_of

NEITHER_MEMORY_NOR_TIME = {
    # What is learned from what: rows of as many tokens need as much, whichever they are.
    *(
        "dataset",
        "dataset_weights",
        "dataset_format",
        "chat_template",
        "chat_template_date",
        "dataset_config",
        "dataset_cache_dir",
        "column_names",
        "sample_by",
        "train_split",
        "text_column",
    ),
    *("text_pair_column", "prompt_column", "response_column", "response_separator", "label_column", "template"),
    *("label_words", "truncate", "skip_empty_rows", "max_train_samples", "preprocessing_num_workers"),
    *("train_sampling_strategy", "length_column_name", "remove_unused_columns", "label_names"),
    # Numbers of the update rule, and which group, weights or tokens have their turn; not how many.
    *(
        "learning_rate",
        "layerwise_lr_decay",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "adam_beta1",
        "adam_beta2",
    ),
    *("adam_epsilon", "max_grad_norm", "inactive_rate", "lora_alpha", "order", "token_pattern", "seed", "data_seed"),
    *("average_tokens_across_devices", "non_finite_limit", "max_steps"),
    # Which weights, and where files lie.
    *("model_revision", "state_dir", "output_dir", "resume_from_checkpoint", "ignore_data_skip"),
    "restore_callback_states_from_checkpoint",
    # Loading of rows, on the host and beside the step.
    *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
    # What is shown and sent.
    *("memory_ledger", "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node"),
    *("logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm"),
    *("report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "debug"),
    *("skip_memory_metrics", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"),
    *("hub_always_push", "hub_revision"),
    # Not read by `slivertune train`.
    *("do_train", "do_eval", "do_predict", "local_rank"),
}
OUTSIDE_OF_UPDATES = {
    # A plan is for updates; the measured peak leaves these out as well.
    *(
        "sample_tokens",
        "sample_prompt",
        "eval_split",
        "eval_file",
        "eval_fraction",
        "max_eval_samples",
        "eval_strategy",
    ),
    *("eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only", "eval_on_start"),
    *("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics"),
    *("batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "load_best_model_at_end", "metric_for_best_model"),
    *("greater_is_better", "save_only_model", "save_strategy", "save_steps", "save_on_each_node"),
    *("enable_jit_checkpoint", "torch_empty_cache_steps", "early_stopping_patience", "report"),
}
SAID_OTHERWISE = {
    # --layout, --num_gpus and --offload_parameters, and what a launcher sets.
    *("fsdp", "fsdp_config", "deepspeed", "accelerator_config", "parallelism_config", "ddp_find_unused_parameters"),
    *("ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout"),
    # A plan's rows are all full, as packed ones are.
    "packing",
    # It takes an option back.
    "unset",
    # --layers_per_group and --steps_per_group.
    "preset",
}
NOT_PLANNED = {
    # A run with one of these says why it is not planned, or is planned as its like in bf16.
    *("torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config"),
    *("label_smoothing_factor", "neftune_noise_alpha", "auto_find_batch_size", "use_cache", "full_determinism"),
    *("gradient_checkpointing_kwargs", "weight_decay", "optim_target_modules"),
    *(new for old, new in RENAMED.items() if old == "gradient_checkpointing_kwargs"),
    *("fp16", "tf32"),
}


NEWEST_NAME = RENAMED.get("gradient_checkpointing", "gradient_checkpointing")


def test_every_option_of_train_is_planned_under_its_name_or_has_a_reason_not_to_be() -> None:
    planned = {*REQUEST_OPTIONS, *plan_options(), *NAMES_OF_FIELDS, "activation_checkpointing", "model_name_or_path"}
    planned |= {name for others in IN_PLACE_OF.values() for name in others}
    options = {action.option_strings[0].removeprefix("--") for action in make_train_parser()._actions} - {"-h"}
    options = {name.removeprefix("no_") for name in options}
    same_name = options & planned
    others = [NEITHER_MEMORY_NOR_TIME, OUTSIDE_OF_UPDATES, SAID_OTHERWISE, NOT_PLANNED]
    listed = [same_name, *others]
    assert sum(map(len, listed)) == len(set().union(*listed)), "a reason is given for what is planned, or two"
    assert set().union(*others) <= options, "an option that train does not have"
    assert options - set().union(*listed) == set(), "plan it, or say why not"


def test_a_plan_has_the_batch_and_the_length_that_train_has() -> None:
    defaults = [REQUEST_OPTIONS[name].default for name in ("batch_size", "seq_length")]
    assert defaults == [CommonOptions().per_device_train_batch_size, DEFAULT_MAX_LENGTH]


def test_names_of_the_model_are_the_same_in_both_commands() -> None:
    parser = make_train_parser()
    for name in ("--model", "--model_name_or_path", "--model-name-or-path"):
        assert parser.parse_args([name, "x"]).model_name_or_path == "x"
        assert parse_plan_arguments([name, "x"]).model == "x"


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (("--layers-per-group=3",), {"layers_per_group": 3}),
        (
            ("--method", "lora", "--lora-target-modules", "q-proj", "v"),
            {"method": "lora", "lora_target_modules": ("q-proj", "v")},
        ),
        (
            ("--method", "lora", "--lora_target_modules", "q_proj,v_proj"),
            {"method": "lora", "lora_target_modules": ("q_proj", "v_proj")},
        ),
        (("--layers", "a+b,c.*", "d"), {"layers": ("a+b", "c.*", "d")}),
        # transformers before 5.23 has the old name alone.
        ((f"--{NEWEST_NAME}", "true"), {"gradient_checkpointing": True}),
    ],
)
def test_names_may_be_written_with_hyphens_as_train_takes_them(
    words: tuple[str, ...], given: dict[str, object]
) -> None:
    assert parse_plan_arguments(["--model", "x", *words]).given == given


OWN = [
    (owner, option)
    for owner, about in METHOD_OPTIONS.items()
    for option in about.options()
    if option.name in REQUEST_OPTIONS
]


@pytest.mark.parametrize(
    ("method", "option"),
    [*product(planned_methods(), OWN)],
    ids=lambda each: each if isinstance(each, str) else each[1].name,
)
def test_an_option_of_another_method_is_refused_as_train_refuses_it(method: str, option: tuple[str, Option]) -> None:
    owner, name = option[0], option[1].name
    words = ["--model", "x", "--method", method, f"--{name}", value_of(option[1])]
    if method == owner:
        assert parse_plan_arguments(words).given.keys() == {"method", name}
        check_method(TRAIN_METHODS[method], frozenset({name}))
        return
    with pytest.raises(ValueError, match=f"--{name}: only --method {owner} reads this") as of_plan:
        parse_plan_arguments(words)
    with pytest.raises(ValueError) as of_train:  # noqa: PT011
        check_method(TRAIN_METHODS[method], frozenset({name}))
    assert str(of_plan.value) == str(of_train.value)


@pytest.mark.parametrize(
    ("words", "owner"),
    [
        (["--density", "0.1"], "sft"),
        (["--method", "lora", "--layers_per_group", "auto"], "hift"),
        (["--method", "lora", "--sweep", "layers_per_group=1,2"], "hift"),
        (["--sweep", "method=dense,lora", "--packed"], "sft"),
        (["--sweep", "method=dense,sft", "--packed"], None),
        (["--sweep", "density=0.1,0.2", "--method", "sft"], None),
        (["--method", "lora", "--save_total_limit", "2"], None),
        (["--compare", "--gpu", "4090", "--density", "0.1"], None),
    ],
)
def test_methods_that_are_swept_or_compared_read_their_own_options(words: list[str], owner: str | None) -> None:
    if owner is None:
        parse_plan_arguments(["--model", "x", *words])
        return
    with pytest.raises(ValueError, match=f"only --method {owner} reads this"):
        parse_plan_arguments(["--model", "x", *words])
