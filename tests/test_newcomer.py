"""A newcomer's hour in a fresh clone: the commands and the script of the README, as they are printed there."""

import json
import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.launching import run_python
from tests.helpers.making import make, skip_without_make
from tests.training.tiny import chat_tokenizer, llama_config

pytestmark = pytest.mark.slow
_BEGIN = """
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

model, tokenizer = AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")
ids = tokenizer("A row of some text.")["input_ids"]
rows = Dataset.from_list([{"input_ids": ids, "labels": ids}] * 8)
arguments = TrainingArguments("out", max_steps=8, use_cpu=True, report_to="none", save_strategy="no")
"""
"""What a script of one's own has before the README's lines."""
_END = """
untrained = AutoModelForCausalLM.from_pretrained("model").state_dict()
changed = [name for name, value in model.state_dict().items() if not value.equal(untrained[name])]
print(f"{len(changed)} of {len(untrained)} changed")
"""
"""Lines behind those of the README: how many of the model's weights have changed."""


@pytest.fixture(scope="module")
def clone(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (checkout / ".git").exists():
        pytest.skip("this is no clone of a repository")
    folder = tmp_path_factory.mktemp("newcomer") / "slivertune"
    subprocess.run(["git", "clone", "--quiet", checkout, folder], check=True)
    return folder


@pytest.fixture(scope="module")
def work(clone: Path) -> Path:
    """A folder with a tiny Llama that writes chats, and with chats."""
    folder = clone.parent / "work"
    folder.mkdir()
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(positions=2048)).save_pretrained(folder / "model")
    chat_tokenizer().save_pretrained(folder / "model")
    chats = [
        {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"{n + 1}"}]}
        for n in range(20)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    return folder


def readme(clone: Path) -> str:
    return (clone / "README.md").read_text(encoding="utf-8")


def results_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return found


def train(clone: Path, work: Path, *words: str) -> dict[str, Any]:
    """Run `slivertune train` of the clone, and return its results."""
    run_python("-m", "slivertune", "train", *words, cwd=work, PYTHONPATH=str(clone / "integrations"))
    return results_of(work / words[words.index("--output_dir") + 1])


def test_the_two_commands_of_the_first_screen_run(clone: Path) -> None:
    skip_without_make()
    text = readme(clone)
    assert re.search(r"^make train +#", text, re.MULTILINE) and re.search(r"^make test +#", text, re.MULTILINE)
    printed = make(clone, "train", "ARGS=--max_steps 8 --use_cpu")
    for part in ("evaluation accuracy", "[before]", "[after]", "report.png"):
        assert part in printed
    results = results_of(clone / "runs" / "hift")
    assert results["num_steps"] == 8 and results["dense"]["peak_bytes"] > 0
    assert re.search(r"^=* ?\d+ passed", make(clone, "test", "ARGS=tests/core -q").splitlines()[-1])
    shutil.rmtree(clone / "runs")


def test_the_three_lines_train_in_a_script_of_ones_own(clone: Path, work: Path) -> None:
    (lines,) = re.findall(r"^```python\n(.*?)^```$", readme(clone), re.MULTILINE | re.DOTALL)
    (work / "own.py").write_text(_BEGIN + textwrap.dedent(lines) + _END, encoding="utf-8")
    printed = run_python("own.py", cwd=work, PYTHONPATH=str(clone / "integrations")).stdout
    found = re.search(r"^(\d+) of (\d+) changed$", printed, re.MULTILINE)
    # Eight updates are less than a turn, so that one layer has trained.
    assert found is not None and 0 < int(found[1]) < int(found[2])


def test_the_plan_of_the_readme_is_made_of_few_wide_blocks(clone: Path, work: Path) -> None:
    # A tiny model fits in batches so large that the search for them takes longer; a plan needs no weights.
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32}
    LlamaConfig(**sizes, num_key_value_heads=8, max_position_embeddings=8192).save_pretrained(work / "wide")
    (line,) = re.findall(r"^slivertune (plan .*)$", readme(clone), re.MULTILINE)
    words = shlex.split(line, comments=True)
    words[words.index("--model") + 1] = "wide"
    done = run_python("-m", "slivertune", *words, cwd=work, timeout_s=800, PYTHONPATH=str(clone / "integrations"))
    for part in ("dense", "LoRA", "SFT (AG)", "HiFT, all layers", "tokens/s"):
        assert part in done.stdout
    assert "can't be planned" not in done.stdout


def test_the_command_with_a_real_models_name_runs_with_a_tiny_one(clone: Path, work: Path) -> None:
    (words,) = re.findall(r"^slivertune (train (?:.*\\\n)*.*)$", readme(clone), re.MULTILINE)
    named = shlex.split(words.replace("\\\n", " "))[1:]
    place = named.index("--model") + 1
    # The rows are chats, and base models have no template for them.
    assert "/" in named[place] and named[place].endswith("-Instruct")
    named[place] = "model"
    results = train(clone, work, *named, "--use_cpu", "--max_steps", "2", "--logging_steps", "1")
    assert (results["num_steps"], results["settings"]["max_length"]) == (2, 512)
    # What it leaves is plain safetensors, as the README says.
    assert (work / "runs/mine/model/model.safetensors").is_file()


def commands_of_which_method(clone: Path) -> list[list[str]]:
    """Words of the commands below the decision table of docs/which-method.md."""
    text = (clone / "docs" / "which-method.md").read_text(encoding="utf-8")
    lines = re.findall(r"^slivertune train (run\.yaml .*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def recorded(method: str) -> str:
    """Method in the results of a run: full is HiFT, with one group."""
    return "hift" if method == "full" else method


def test_each_command_of_which_method_trains(clone: Path, work: Path) -> None:
    # The commands are for an 8B of 34 layers, and so are these blocks with an embedding and a head.
    config = llama_config(positions=2048)
    config.num_hidden_layers = 32
    LlamaForCausalLM(config).save_pretrained(work / "deep")
    chat_tokenizer().save_pretrained(work / "deep")
    asked = {"model_name_or_path": "deep", "dataset": "chats.jsonl", "use_cpu": True, "max_steps": 2}
    asked |= {"memory_ledger": "off"}
    (work / "run.yaml").write_text(json.dumps(asked), encoding="utf-8")
    found = commands_of_which_method(clone)
    assert len(found) == 8
    for number, words in enumerate(found):
        results = train(clone, work, *words, "--output_dir", f"which/{number}")
        assert results["num_steps"] == 2 and results["method"] == recorded(words[words.index("--method") + 1])


def options_of_the_decisions(text: str) -> list[str]:
    """Options in the column "Use" of the decision table."""
    table = text.partition("<!-- decision -->")[2].partition("<!-- /decision -->")[0]
    rows = [line.split("|")[2] for line in table.strip().splitlines()[2:]]
    return [options for row in rows for options in re.findall(r"`(--[^`]+)`", row)]


def test_each_option_of_the_decision_table_trains(clone: Path, work: Path) -> None:
    found = options_of_the_decisions(readme(clone))
    assert len(found) >= 7
    common = ("--model_name_or_path", "model", "--dataset", "chats.jsonl", "--use_cpu", "--max_steps", "2")
    for number, options in enumerate(found):
        words = shlex.split(options)
        if "--method" not in words:
            # The table names the methods in words: 4-bit weights are for LoRA and SFT, the other options for HiFT.
            words += ["--method", "lora" if "--load_in_4bit" in words else "hift"]
        results = train(clone, work, *common, *words, "--memory_ledger", "off", "--output_dir", f"runs/{number}")
        assert results["num_steps"] == 2 and results["method"] == recorded(words[words.index("--method") + 1])
