import copy
import pickle
import shlex

import pytest

from slivertune.cli import main
from slivertune.core import masking
from slivertune.core.masking import MASK, Secret, is_secret, learn, masked

RANDOM = "aB3_dE6-gH9" * 4
TOKENS = (
    f"sk-proj-{RANDOM}",
    f"sk-ant-api03-{RANDOM}",
    f"hf_oauth_{RANDOM}.{RANDOM}",
    f"hf_app_{RANDOM.replace('-', '')}",
    f"ghr_{'x1' * 20}",
    f"glpat-{RANDOM[:20]}",
)


LONG_NAMES = "hf_a_name_of_a_function_that_is_long, glpat-short, disk-0123456789012345678901"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_known", set())


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *((name, True) for name in ("--hub_token", "--hub-token", "token", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")),
        *((name, True) for name in ("MY_PASSWORD", "api_key", "CLEARML_API_SECRET_KEY", "push_to_hub_token")),
        *((name, True) for name in ("accessToken", "Authorization", "GH_PAT", "PGPASSWORD", "MYSQL_PWD", "api-keys")),
        *((name, True) for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_KEY", "private_key")),
        *((name, True) for name in ("--wandb_key", "hf-key", "HUB_KEYS", "openaiKey", "ANTHROPIC_KEY")),
        *((name, False) for name in ("PWD", "OLDPWD", "author", "sort_key", "bytes_per_token_pattern", "shelf_key")),
        *(
            (name, False)
            for name in ("--token_ratio", "--sample_tokens", "--token_tile_size", "--token_pattern", "key")
        ),
        *((name, False) for name in ("pad_token", "eos_token", "include_num_input_tokens_seen", "seed", "--tokens")),
    ],
)
def test_a_secret_is_told_by_its_name(name: str, found: bool) -> None:
    assert is_secret(name) is found


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("slivertune train --hub_token s --seed 3", f"slivertune train --hub_token {MASK} --seed 3"),
        ("--hub-token='s t' --seed 3", f"--hub-token={MASK} --seed 3"),
        (f"--hub_token '{MASK}' --seed 3", f"--hub_token '{MASK}' --seed 3"),
        ("unrecognized arguments: --token abc", f"unrecognized arguments: --token {MASK}"),
        ("argument --hub_token: expected one argument", "argument --hub_token: expected one argument"),
        ("at https://me:pass@host/a.csv?x=1", f"at https://{MASK}@host/a.csv?x=1"),
        ("no folder https:/me:pass@host/a, s3:/k@b", f"no folder https:/{MASK}@host/a, s3:/{MASK}@b"),
        ("unrecognized arguments: --wandb_key abc", f"unrecognized arguments: --wandb_key {MASK}"),
        ("C:/me@host/a and a:b@host", "C:/me@host/a and a:b@host"),
        ("s3://host/a?X-Amz-Signature=abc&x=1", f"s3://host/a?X-Amz-Signature={MASK}&x=1"),
        ('{"api_key": "abc", "eos_token": "x"}', f'{{"api_key": "{MASK}", "eos_token": "x"}}'),
        (f"a hf_{'x' * 34}.", f"a {MASK}."),
        (f"a ghp_{'x' * 36} and sk-{'x' * 24}", f"a {MASK} and {MASK}"),
        *((f"a {token}, b", f"a {MASK}, b") for token in TOKENS),
        ("--wandb-api-key abc --seed 3", f"--wandb-api-key {MASK} --seed 3"),
        ("HF_TOKEN=abc WANDB_API_KEY='a c' slivertune", f"HF_TOKEN={MASK} WANDB_API_KEY={MASK} slivertune"),
        ("https://host/a?auth=abc#x", f"https://host/a?auth={MASK}#x"),
        ('{"accessToken":"abc"}', f'{{"accessToken":"{MASK}"}}'),
        ("Authorization: Bearer abc", f"Authorization: Bearer {MASK}"),
        ("a run sk-learn-with-a-very-long-name", "a run sk-learn-with-a-very-long-name"),
        (LONG_NAMES, LONG_NAMES),
        ("eos_token='</s>' pad_token=0", "eos_token='</s>' pad_token=0"),
        (
            "--token_ratio 0.3 --sample_tokens 4 me@host a/hf_model",
            "--token_ratio 0.3 --sample_tokens 4 me@host a/hf_model",
        ),
    ],
)
def test_secrets_in_a_text_are_masked_and_nothing_else(text: str, without: str) -> None:
    assert masked(text) == without and masked(without) == without


def test_in_lists_and_mappings_the_name_before_a_value_tells() -> None:
    words = ["train", "--hub_token", "s", "--token=t", "--seed", "3"]
    assert masked(words) == ["train", "--hub_token", MASK, f"--token={MASK}", "--seed", "3"]
    assert masked(tuple(words)) == tuple(masked(words))
    assert masked({"hub_token": "s", "nested": [{"api_key": "s"}], "eos_token": "</s>", "steps": 3, "token": None}) == {
        "hub_token": MASK,
        "nested": [{"api_key": MASK}],
        "eos_token": "</s>",
        "steps": 3,
        "token": None,
    }
    nested = {"api_key": {"value": "s", "tries": 3}, "accessToken": ["s", ("t",)], "bytes_per_token": 4.5}
    assert masked(nested) == {
        "api_key": {"value": MASK, "tries": 3},
        "accessToken": [MASK, (MASK,)],
        "bytes_per_token": 4.5,
    }
    assert masked("".join(shlex.join(masked(words)))) == shlex.join(masked(words))


def test_what_was_learned_is_masked_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "of the environment")
    monkeypatch.setenv("OTHER_TOKEN", "true")
    learn(["--hub_token", "first one", "--api-key=second"], {"hub_token": "third one", "more": {"password": "fourth"}})
    learn(["--rows", "lora:--method lora --hub_token of-a-row"], {"comet": [{"api_key": ["in a list"]}]})
    text = "true: first one, second, third one, fourth, of the environment, of-a-row, in a list"
    assert masked(text) == f"true: {', '.join([MASK] * 7)}"


@pytest.mark.parametrize("typed", [["--hub_tokn", "{}"], ["--hubtoken={}"], ["--hub-tokens", "{}"]])
def test_the_value_of_a_mistyped_option_for_a_secret_is_masked_in_the_error(
    typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    value = "Tr0ub4dor-and-3"
    assert main(["train", *(word.format(value) for word in typed)]) == 2
    error = capsys.readouterr().err
    assert "did you mean --hub_token?" in error and MASK in error and value not in error
    learn(["--pad_token", "of-a-tokenizer", "--hub_strategy", "checkpoint", "--num_tokens", "3000000"])
    assert masked("of-a-tokenizer, checkpoint, 3000000") == "of-a-tokenizer, checkpoint, 3000000"


def test_a_secret_is_itself_to_who_reads_it_and_the_mask_in_a_pickle_and_a_repr() -> None:
    secret = Secret("s3cret")
    assert (f"Bearer {secret}", secret) == ("Bearer s3cret", "s3cret")
    assert pickle.loads(pickle.dumps({"a": [secret]})) == {"a": [MASK]} and "s3cret" not in repr([secret])
    assert copy.deepcopy([secret]) == copy.copy([secret]) == ["s3cret"]
