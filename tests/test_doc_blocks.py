"""Blocks of Python and commands of README and of the pages that no other test runs whole."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Trainer,
)

import slivertune
from slivertune.cli import _make_parser, main
from slivertune.core.manifest import DamagedCheckpointError
from slivertune.core.presets import preset_path
from slivertune.training.command_line.plan_words import parse_plan_arguments
from slivertune.training.comparison.arguments import parse_compare_arguments
from slivertune.training.options.parser import given_values
from tests.conftest import CHECKOUT
from tests.helpers.models import VOCAB, tiny_llama
from tests.training.tiny import CHATML, quiet_arguments
from tests.training.tiny_runs import UNMEASURED, sentences

RUN_ELSEWHERE = ("command-line", "data", "first-hour")
"""Pages whose commands are all run, each by a test of its own."""
_WHOLE = re.MULTILINE | re.DOTALL
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]


def commands() -> list[Any]:
    found = []
    for page in PAGES:
        if page.stem in RUN_ELSEWHERE:
            continue
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), _WHOLE):
            if language not in ("", "bash"):
                continue
            lines = [line for line in block.replace("\\\n", " ").splitlines() if line.startswith("slivertune ")]
            words = [shlex.split(line, comments=True)[1:] for line in lines]
            found += [pytest.param(each, id=f"{page.stem}-{' '.join(each)[:50]}") for each in words]
    return found


def of_verb(verb: str) -> list[Any]:
    return [each for each in commands() if each.values[0][0] == verb]


def test_every_verb_is_shown() -> None:
    assert {each.values[0][0] for each in commands()} == {"train", "plan", "compare", "merge", "unmerge", "report"}


@pytest.mark.parametrize("words", [each for each in commands() if "--help" not in each.values[0]])
def test_every_option_of_a_command_is_one_that_there_is(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("seed: 1", encoding="utf-8")
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/slivertune_run.yaml").write_text("model_name_or_path: PATH", encoding="utf-8")
    parse: dict[str, Any] = {
        "train": given_values,
        "plan": parse_plan_arguments,
        "compare": lambda words: (given_values(parse_compare_arguments(words).common),),
    }
    if words[0] in parse:
        assert parse[words[0]](words[1:])
    else:
        assert _make_parser().parse_args(words).command == words[0]


@pytest.mark.slow
# Comparisons take minutes each; tests/planning/test_compare.py makes one.
@pytest.mark.parametrize("words", [each for each in of_verb("plan") if "--compare" not in each.values[0]])
def test_every_plan_is_made(
    words: list[str],
    tiny_base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = list(words)
    if "--model" in words:
        words[words.index("--model") + 1] = str(tiny_base)
    else:
        run = Path(words[1])
        run.parent.mkdir(parents=True)
        run.write_text(f"model_name_or_path: {tiny_base}\nbf16: true\ngradient_checkpointing: true\n", encoding="utf-8")
    assert main([*words, *(() if "--sweep" in words or "--seq_length" in words else ("--seq_length", "64"))]) == 0
    assert capfd.readouterr().out
    assert "--plot" not in words or Path(words[words.index("--plot") + 1]).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_training_of_the_readme_runs_and_what_it_leaves_is_drawn(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    turns = [({"role": "user", "content": text}, {"role": "assistant", "content": "yes"}) for text in sentences(20)]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in turns), encoding="utf-8")
    shutil.copytree(tiny_base, "instruct")
    tokenizer = AutoTokenizer.from_pretrained("instruct")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained("instruct")
    (words,) = [each.values[0] for each in of_verb("train") if str(each.id).startswith("README")]
    # The tiny model reads 256 bytes. Base models have no template for chats, so that the page names an instruct model.
    smaller = {"meta-llama/Llama-3.1-8B-Instruct": "instruct", "512": "128"}
    assert smaller.keys() <= set(words)
    more = ("--use_cpu", "--max_steps", "2", "--logging_steps", "1", "--sample_tokens", "0")
    assert main([*(smaller.get(word, word) for word in words), *more]) == 0
    assert main(["report", "runs/mine", "--output", "hift.png"]) == 0 and Path("hift.png").is_file()


def of_other_pages(verb: str) -> list[Any]:
    """Commands of a verb that are run here: README's and those of which-method have tests of their own."""
    return [each for each in of_verb(verb) if not str(each.id).startswith(("README", "which-method"))]


@pytest.fixture
def user(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Whoever types a page's command, in a folder with the files that it names; gives the words for small ones."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": text, "completion": " yes"} for text in sentences(20)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    chats = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        for row in rows
    ]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    tokenizer.chat_template = CHATML
    shutil.copytree(tiny_base, "model")
    config = MambaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        state_size=4,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )
    MambaForCausalLM(config).save_pretrained("mamba")
    for folder in ("model", "mamba"):
        tokenizer.save_pretrained(folder)
    Path("run.yaml").write_text("model_name_or_path: model\ndataset: data.jsonl\nmax_steps: 2\n", encoding="utf-8")

    def small(words: list[str]) -> list[str]:
        model = "mamba" if any("backbone" in word for word in words) else "model"
        words = [model if word == "PATH_OR_HUB_ID" else word for word in words]
        has_file = "run.yaml" in words
        missing = {"--model_name_or_path": model, "--dataset": "data.jsonl", "--output_dir": "out"}
        for name, value in missing.items():
            if name not in words and not (has_file and name != "--output_dir"):
                words += [name, value]
        # The last value of an option counts.
        return [*words, *("--max_steps", "3", "--max_length", "128", "--use_cpu"), *UNMEASURED]

    return small


@pytest.mark.slow
@pytest.mark.parametrize("words", of_other_pages("train"))
def test_every_training_of_a_page_runs(words: list[str], user: Callable[..., list[str]]) -> None:
    often = [word for name in ("--eval_steps", "--save_steps") if name in words for word in (name, "1")]
    assert main([*user(words), *often, "--sample_tokens", "0"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("words", [each for each in of_other_pages("compare") if len(each.values[0]) > 1])
def test_every_comparison_of_a_page_runs(words: list[str], user: Callable[..., list[str]]) -> None:
    rows = () if "--rows" in words else ("--rows", "hift")
    assert main([*user([*words, *rows]), "--max_steps", "1"]) == 0
    assert Path("out/compare.json").is_file()


@pytest.mark.slow
def test_deltas_are_merged_and_unmerged_by_the_commands_of_the_page(user: Callable[..., list[str]]) -> None:
    assert main([*user(["train", "--method", "sft", "--density", "0.1"]), "--sample_tokens", "0"]) == 0
    deltas = next(Path("out").rglob("*delta*"))
    shutil.copytree(deltas if deltas.is_dir() else deltas.parent, "deltas")
    for verb in ("merge", "unmerge"):
        (words,) = [each.values[0] for each in of_other_pages(verb)]
        assert main(words) == 0
    base, again = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in ("model", "base"))
    assert all(torch.equal(again[name], value) for name, value in base.items())


def test_presets_that_pages_name_are_there() -> None:
    named = {
        name
        for page in PAGES
        for name in re.findall(r"\$\(slivertune path ([\w.]+)\)", page.read_text(encoding="utf-8"))
    }
    assert len(named) >= 4 and all(preset_path(name).is_file() for name in named)


def python_blocks(stem: str) -> list[str]:
    text = (CHECKOUT / "docs" / f"{stem}.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, _WHOLE)


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the blocks name and don't make."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    model = tiny_llama(blocks=9)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCAB, (12, 16))]
    arguments = quiet_arguments(tmp_path / "out", max_steps=2, save_strategy="no")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path = tmp_path / "base"
    model.save_pretrained(path)
    return {
        "st": slivertune,
        "torch": torch,
        "model": model,
        "rows": rows,
        "dataset": rows,
        "args": arguments,
        "arguments": arguments,
        "Trainer": Trainer,
        # TRL's is a Trainer as well, and has tests of its own.
        "SFTTrainer": Trainer,
        "Accelerator": lambda: Accelerator(cpu=True),
        "HiFT": slivertune.HiFT,
        "HiFTConfig": slivertune.HiFTConfig,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "path": path,
        "get_peft_model": get_peft_model,
        "lora": LoraConfig(r=2, target_modules="all-linear"),
        "device": "cpu",
        "loader": torch.utils.data.DataLoader(rows),  # type: ignore[arg-type]
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "optimizer": optimizer,
        "batches": [{name: value[None] for name, value in row.items()} for row in rows[:2]],
        "get_state_dict": get_state_dict,
        "dcp": dcp,
        "folder": str(tmp_path / "checkpoint"),
        "hidden": torch.randn(6, 4, requires_grad=True),
        "head": torch.nn.Linear(4, 7),
        "targets": torch.randint(0, 7, (6,)),
    }


@pytest.mark.parametrize(
    ("page", "number"),
    [
        *[("hift", number) for number in (0, *range(2, 10))],
        ("long-sequences", 0),
        ("parked", 0),
        ("parked", 1),
        ("ranks", 0),
        ("sft", 0),
        ("trainers", 0),
        ("trainers", 1),
        ("tokentune", 0),
        ("tokentune", 1),
        ("chunked_cross_entropy", 0),
    ],
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's
def test_a_block_of_a_page_runs(page: str, number: int, scope: dict[str, Any]) -> None:
    block = python_blocks(page)[number]
    if "activation_checkpointing_enable" in block and not hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("transformers before 5.23 calls it gradient_checkpointing_enable, as docs/long-sequences.md says")
    before = set(scope)
    exec(compile(block, f"{page}.md", "exec"), scope)
    if "trainer" in scope:
        assert scope["trainer"].state.global_step == 2
    if "loss" in scope:
        expected = torch.nn.functional.cross_entropy(scope["head"](scope["hidden"]), scope["targets"])
        assert torch.allclose(scope["loss"], expected)
    if "quality" in scope:
        assert "0.3" in scope["quality"].table() and Path("quality.png").is_file()
    assert set(scope) > before


def test_groups_may_be_given_as_the_page_says() -> None:
    config = eval(python_blocks("hift")[1], {"HiFTConfig": slivertune.HiFTConfig})
    optimizer = slivertune.HiFT(tiny_llama(blocks=2), torch.optim.AdamW, config=config)
    assert [len(group.layers) for group in optimizer.groups] == [1, 1, 1]


def test_masters_of_a_zero_checkpoint_are_read_by_the_name_that_the_page_says() -> None:
    imported, _, read = python_blocks("ranks")[1].partition("\n\n")
    scope: dict[str, Any] = {}
    exec(compile(imported, "ranks.md", "exec"), scope)
    with pytest.raises(DamagedCheckpointError, match="global_step500"):
        exec(compile(read, "ranks.md", "exec"), scope)


def test_deltas_are_saved_applied_and_summed_as_the_page_says(scope: dict[str, Any]) -> None:
    saved, applied = python_blocks("sft")
    exec(compile(saved, "sft.md", "exec"), scope)
    for name in ("law", "german"):
        shutil.copytree("deltas", name)
    scope["model"] = tiny_llama(blocks=9)
    exec(compile(applied, "sft.md", "exec"), scope)
    assert scope["handle"].overlap


def test_a_script_adds_its_own_numbers_to_the_log_as_the_page_says(scope: dict[str, Any]) -> None:
    exec(compile(python_blocks("hift")[0].replace("trainer.train()", ""), "hift.md", "exec"), scope)
    scope["trainer"].args.logging_steps = 1
    scope["queue"] = [0] * 7
    exec(compile(python_blocks("watching")[0], "watching.md", "exec"), scope)
    scope["trainer"].train()
    assert [line["mine/queue"] for line in scope["trainer"].state.log_history if "loss" in line] == [7, 7]


def test_each_block_of_python_is_run_by_a_test() -> None:
    """Tests elsewhere run README's, coming-from.md's and LLaMA-Factory's. A new block needs a line here."""
    found = {page.stem: len(python_blocks(page.stem)) for page in PAGES[1:] if python_blocks(page.stem)}
    assert found.pop("coming-from") == 11
    assert found == {
        "hift": 10, "ranks": 2, "sft": 2, "trainers": 3, "tokentune": 2, "chunked_cross_entropy": 1, "watching": 1,
        "long-sequences": 1, "parked": 2,
    }  # fmt: skip
