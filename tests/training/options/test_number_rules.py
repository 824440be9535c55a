import re
from pathlib import Path

import pytest

from slivertune.cli import main
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.options.methods import METHOD_OPTIONS
from slivertune.training.options.number_rules import number_rule
from slivertune.training.options.table import Option, train_options

pytestmark = pytest.mark.usefixtures("parsers_made_once")

OPTIONS = train_options()
NUMBERS = [each for each in OPTIONS.values() if number_rule(each) is not None]
CHOICES = [each for each in OPTIONS.values() if each.choices]
MAPPINGS = [each for each in OPTIONS.values() if each.takes_mapping]
SWITCHES = [each for each in OPTIONS.values() if each.is_switch]
WRONG = ("word", "", "nan", "inf", "-inf", "below", "above", "-1e-4", "-1,5", "9" * 5000)
FREE_TEXTS = {
    "names of files, folders, runs and what lies on the hub": (
        "model_name_or_path model_revision dataset dataset_config dataset_cache_dir train_split eval_split eval_file "
        "state_dir output_dir resume_from_checkpoint run_name project hub_model_id hub_token hub_revision "
        "trackio_space_id trackio_bucket_id trackio_static_space_id"
    ),
    "names of columns, metrics and modules": (
        "text_column text_pair_column label_column prompt_column response_column column_names label_names layers "
        "length_column_name include_for_metrics metric_for_best_model lora_target_modules sft_target_modules "
        "optim_target_modules"
    ),
    "parts of what a model reads": (
        "template label_words sample_prompt response_separator chat_template chat_template_date"
    ),
    "words that other libraries or other settings read": (
        "gpu attn_implementation optim_args debug fsdp torch_compile_backend torch_compile_mode report_to "
        "parallelism_config"
    ),
}
"""Options that take any text where they are read; what it names is looked for later, and errors then name it."""
MAY_BE_EMPTY = ("sample_prompt", "response_separator", "template", "optim_args", "debug", "fsdp")
ANY_SIGN = {"below": "-3", "above": str(10**30)}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def owner_of(option: Option) -> list[str]:
    """The method that reads the option, as typed."""
    return next((["--method", name] for name, each in METHOD_OPTIONS.items() if each.options_class is option.owner), [])


@pytest.mark.parametrize("option", NUMBERS, ids=lambda each: each.name)
def test_a_wrong_number_is_refused_by_the_name_of_its_option_and_its_value(option: Option) -> None:
    for wrong in WRONG:
        value = ANY_SIGN.get(wrong, wrong)
        with pytest.raises(ValueError, match=rf"\b{option.name}\b") as refused:
            parse_train_arguments([*owner_of(option), f"--{option.name}", value])
        said = str(refused.value)
        number = value if option.item_kind is None else value.partition(",")[0]  # a comma parts the numbers of a list
        assert value in said or (number and "," not in number and str(float(number)) in said), (wrong, said)
        assert re.search(r"must|lie", said), (wrong, said)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("option", SWITCHES, ids=lambda each: each.name)
def test_a_switch_stands_alone_and_takes_no_other_word(option: Option) -> None:
    assert option.may_stand_alone or str in option.kinds
    for wrong in ("maybe", "", "2", "-1"):
        with pytest.raises(
            ValueError, match=rf"--{option.name}\b.*(expected one of yes/no, true/false|must be true or false)"
        ):
            parse_train_arguments([*owner_of(option), f"--{option.name}", wrong])


@pytest.mark.parametrize("option", MAPPINGS, ids=lambda each: each.name)
def test_a_mapping_that_is_none_is_refused_by_the_name_of_its_option(option: Option) -> None:
    listed = ("[]", "3", "word", "") if option.name.endswith("_kwargs") or str not in option.kinds else ()
    for wrong in ('{"a":', '{"a": 1, }', f'{{"a": {"9" * 5000}}}', *listed):
        with pytest.raises(ValueError, match=rf"--{option.name} .*(must be a JSON mapping|a number with too many)"):
            parse_train_arguments([f"--{option.name}", wrong])


@pytest.mark.parametrize("name", sorted(" ".join(FREE_TEXTS.values()).split()))
def test_an_empty_text_names_nothing(name: str) -> None:
    if name not in OPTIONS or name in MAY_BE_EMPTY:
        return
    with pytest.raises(ValueError, match=rf"--{name}\b.*('' is empty\. Give a value|invalid .* value: '')"):
        parse_train_arguments([f"--{name}", ""])


def test_every_option_is_checked_here_or_stands_in_the_list_of_free_texts() -> None:
    listed = [name for names in FREE_TEXTS.values() for name in names.split()]
    checked = {option.name for option in (*NUMBERS, *CHOICES, *SWITCHES, *MAPPINGS)}
    assert len(set(listed)) == len(listed)
    # Of two versions of transformers, each has fields that the other lacks.
    assert OPTIONS.keys() - checked == set(listed) & OPTIONS.keys()


@pytest.mark.parametrize("option", CHOICES, ids=lambda each: each.name)
def test_an_unknown_choice_is_refused_with_all_that_there_are(option: Option) -> None:
    for value in ("magic", ""):
        with pytest.raises(ValueError, match=rf"--{option.name}\b.*invalid choice: {value!r}.*{option.choices[0]}"):
            parse_train_arguments([*owner_of(option), f"--{option.name}", value])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--num_train_epochs", "-3"), "--num_train_epochs -3.0 must be more than 0"),
        (("--max_steps", "0"), "--max_steps 0 must be at least 1 and at most 2147483647, or -1 to leave it off"),
        (("--learning_rate", "1e6"), "--learning_rate 1000000.0 must be at least 0 and at most 100"),
        (("--learning-rate", "-1e-4"), "--learning_rate -0.0001 must be at least 0 and at most 100"),
        (("--max_grad_norm", "-1"), "--max_grad_norm -1.0 must be at least 0"),
        (("--per_device_train_batch_size", "0"), "--per_device_train_batch_size 0 must be at least 1"),
        (("--adam_beta2", "1"), "--adam_beta2 1.0 must be at least 0 and less than 1"),
        (
            ("--max_steps", "-5e0"),
            "--max_steps '-5e0' must be a whole number, at least 1 and at most 2147483647,",
        ),
        (("--weight_decay", "-.1"), "--weight_decay -0.1 must be at least 0 and at most 100"),
        (("--seed", "-1"), "--seed -1 must be at least 0 and at most 4294967295"),
        (("--prefetch_bytes", "-1"), "--prefetch_bytes '-1' must be a size, such as 24GiB"),
        (("--seed", "9" * 5000), f"--seed '{'9' * 20}... (5,000 digits)' must be a whole number, at least 0 and"),
        (
            ("--layers_per_group", "9" * 5000),
            f"--layers_per_group '{'9' * 20}... (5,000 digits)' must be an integer, a share",
        ),
        (("digits.json",), f"digits.json: --seed '{'9' * 20}... (5,000 digits)' must be a whole number, at least 0"),
        (("inside.json",), "inside.json: --lr_scheduler_kwargs {'a': '99999999999999999999... (5,000 digits)'} has a"),
        (
            ("inside.yaml",),
            "inside.yaml, line 1: --lr_scheduler_kwargs {'a': '99999999999999999999... (5,0",
        ),
        (("--output_dir", ""), "--output_dir '' is empty. Give a value"),
        (("--output_dir", "new/" + "x" * 300), "output_dir 'new/xxx"),
        (("--tf32",), "--tf32 needs an NVIDIA GPU of compute capability 8 or later, and none is here. Leave it out"),
        (("--method", "lora", "--fp16"), "--fp16 needs a GPU, and this run has none. Leave it out, or use --bf16"),
        (("run.yaml",), "run.yaml, line 2: --warmup_steps -1.0 must be at least 0"),
    ],
    ids=lambda words: words[0],
)
def test_what_is_wrong_is_one_line_before_anything_is_loaded(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = "9" * 5000
    written = {
        "run.yaml": "seed: 3\nwarmup_steps: -1\n",
        "digits.json": f'{{"seed": {digits}}}',
        "inside.json": f'{{"lr_scheduler_kwargs": {{"a": {digits}}}}}',
        "inside.yaml": f"lr_scheduler_kwargs: {{a: {digits}}}\n",
    }
    for name, text in written.items():
        Path(name).write_text(text, encoding="utf-8")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("slivertune.training.ranks.processes.is_torch_tf32_available", lambda: False)
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"slivertune train: error: {said}") and error.count("\n") == 1
    assert {path.name for path in Path().iterdir()} == set(written)
