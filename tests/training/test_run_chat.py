"""Chats and instructions through the command: what it says first, what it learns, and what it leaves."""

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from slivertune.cli import main
from slivertune.core.manifest import read_entries, write_manifest
from slivertune.training.comparison import comparison as comparing
from tests.training.tiny import CHATML, MARKED, chat_tokenizer, llama_config
from tests.training.tiny_runs import COMBINATIONS, UNMEASURED, Runs, complaint, train, train_arguments

WORDS = ("red", "blue", "green", "black")
CHATS = [
    {"messages": [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word.upper()}]}
    for word in WORDS
] * 6
QUESTIONS = [{"question": f"Say {word}.", "answer": word.upper()} for word in WORDS] * 6


TURN_END = (
    "the chat template ends a turn by '<|im_end|>' and not by the EOS token '<eos>'. To end generation with the turn, "
    "pass the id of '<|im_end|>' as eos_token_id"
)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_base(folder: Path, template: str | None) -> Path:
    """A random Llama of two layers, whose tokenizer has a chat template or none."""
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(positions=128)).save_pretrained(folder)
    chat_tokenizer(template).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chat_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("chat") / "base", CHATML)


@pytest.fixture(scope="module")
def plain_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("plain") / "base", None)


@pytest.fixture
def chats(chat_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Runs:
    """Runs over chats, of a base whose tokenizer has a chat template."""
    return Runs(chat_base, write_rows(tmp_path / "chats.jsonl", CHATS), tmp_path, capsys)


def test_every_command_of_the_page_on_data_runs_as_shown(
    chats: Runs, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (checkout / "docs" / "data.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        Path(name).write_text(text, encoding="utf-8")
    commands = re.findall(r"^slivertune (train .*)$", page, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        words = command.replace("PATH_OR_HUB_ID", str(chats.base)).split()
        assert main([*words, "--max_steps", "1", "--sample_tokens", "0", "--memory_ledger", "off"]) == 0
    lines = first_lines(chats.printed())
    (shown,) = re.findall(r"^  data    (read as .*)$", page, re.MULTILINE)
    assert lines.count(shown) == 2 and f"chat.jsonl (weight 0.7): {shown}" in lines


def first_lines(printed: str) -> list[str]:
    return re.findall(r"^  data    (.*)$", printed, re.MULTILINE)


def loss_of_answers(folder: Path, tokenizer: PreTrainedTokenizerFast) -> float:
    """The mean loss of a saved model over what follows the generation prompt, by plain transformers."""
    model, losses = AutoModelForCausalLM.from_pretrained(folder), []
    for row in CHATS[: len(WORDS)]:
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template(row["messages"])["input_ids"]
        labels = [-100] * len(prompt) + whole[len(prompt) :]
        with torch.no_grad():
            losses.append(model(input_ids=torch.tensor([whole]), labels=torch.tensor([labels])).loss.item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("method", ["hift", pytest.param("dense", marks=pytest.mark.slow)])
def test_a_chat_trains_and_the_saved_model_answers_in_plain_transformers(method: str, chats: Runs) -> None:
    rows = [*CHATS, {"messages": [{"role": "user", "content": "Nobody answers."}]}]
    data = write_rows(chats["chats.jsonl"], rows)
    results = chats.train("out", "--max_steps", "60", "--sample_tokens", "8", *UNMEASURED, method=method)
    named, *notes = first_lines(chats.printed())
    assert named.startswith(f"{data}: 22 rows to train on, 2 to evaluate on")
    assert notes == [
        "read as chat (messages); loss on the assistant's turns",
        "1 of 23 train rows dropped: no assistant turn",
        TURN_END,
    ]
    folder = Path(results["model_folder"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == CHATML
    # Only what is said was trained: four words and their ends, which 60 updates learn nearly by heart.
    assert loss_of_answers(folder, tokenizer) < 0.7 * loss_of_answers(chats.base, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(CHATS[0]["messages"][:1], add_generation_prompt=True, return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert out.shape[1] > prompt["input_ids"].shape[1]
    sample = results["sample"]
    assert sample["prompt"].startswith("user\nSay ") and sample["expected"].strip() in {word.upper() for word in WORDS}


def test_a_named_template_is_used_and_saved_with_the_model(
    plain_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, template = write_rows(tmp_path / "chats.jsonl", CHATS), tmp_path / "chat.jinja"
    template.write_text(MARKED, encoding="utf-8")
    results = train(plain_base, data, tmp_path / "out", "--chat_template", str(template))
    assert AutoTokenizer.from_pretrained(results["model_folder"]).chat_template == MARKED
    assert AutoTokenizer.from_pretrained(results["checkpoint"]).chat_template == MARKED
    assert "read as chat (messages)" in first_lines(capsys.readouterr().out)[1]


def test_datasets_of_two_formats_train_together_by_weight(chats: Runs) -> None:
    answers, questions = chats["chats.jsonl"], write_rows(chats["b.jsonl"], QUESTIONS)
    more = ("--dataset", str(answers), str(questions), "--dataset_weights", "0.7", "0.3", *UNMEASURED)
    results = chats.train("out", *more)
    assert results["dataset"] == f"{answers} + {questions}"
    _, first, second, last = first_lines(chats.printed())
    assert first == f"{answers} (weight 0.7): read as chat (messages); loss on the assistant's turns"
    assert second.startswith(
        f"{questions} (weight 0.3): read as question and answer (question, answer), written by the"
    )
    assert last == TURN_END


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("hift with tokens", False),
        pytest.param("sft", True, marks=pytest.mark.slow),
        pytest.param("lora with tokens", True, marks=pytest.mark.slow),
    ],
)
def test_every_method_and_token_selection_take_chats(name: str, packed: bool, chats: Runs) -> None:
    results = chats.train("out", *COMBINATIONS[name], "--packing", str(packed), "--max_length", "64", *UNMEASURED)
    assert results["num_steps"] == 6
    assert results["after"]["eval_loss"] != results["before"]["eval_loss"]


def test_a_run_keeps_its_date_when_it_is_resumed_on_another_day_and_when_it_is_repeated(
    chats: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_day(monkeypatch, 26)
    dated = ("--chat_template", CHATML + "{{ strftime_now('%d %b %Y') }}", "--save_steps", "3", "--max_length", "128")
    whole = chats.train("whole", *dated, *UNMEASURED)
    said = "the chat template writes the date, which is 2026-11-26 in this run (--chat_template_date)"
    assert said in first_lines(chats.printed()) and whole["settings"]["chat_template_date"] == "2026-11-26"
    on_day(monkeypatch, 27)
    resume = ("--resume_from_checkpoint", str(chats["whole"] / "checkpoint-3"))
    again = chats.train("again", *dated, *resume, *UNMEASURED)
    assert said in first_lines(chats.printed()) and again["after"] == whole["after"]
    assert "chat_template_date: '2026-11-26'" in (chats["whole"] / "slivertune_run.yaml").read_text(encoding="utf-8")
    tomorrow = chats.train("tomorrow", *dated, "--chat_template_date", "2026-11-27", "--max_steps", "1", *UNMEASURED)
    assert tomorrow["before"] != whole["before"]
    checkpoint = chats["whole"] / "checkpoint-3"
    values = read_entries(checkpoint)
    facts = values["facts"] | {"chat_template_date": "soon"}
    write_manifest(checkpoint, {"global_step": values["global_step"], "facts": facts})
    fault = f"{checkpoint} has chat_template_date='soon', which is no date"
    assert fault in chats.complaint(*dated, "--resume_from_checkpoint", str(checkpoint))


@pytest.mark.slow
def test_rows_of_a_comparison_have_one_date_also_when_it_goes_on_another_day(
    chats: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's template would write the day of the run, so that rows after midnight had other tokens."""
    days, said = [26], list[str]()

    def train_on_the_next_day(words: Sequence[str], *_: Any) -> None:
        on_day(monkeypatch, days[-1])
        days.append(days[-1] + 1)
        assert main(list(words[2:])) == 0
        said.extend(re.findall(r"the date, which is (\S+) in this run", " ".join(chats.printed().split())))

    monkeypatch.setattr(comparing, "run_process", train_on_the_next_day)
    place = ("--model_name_or_path", str(chats.base), "--dataset", str(chats["chats.jsonl"]))
    place += ("--output_dir", str(chats["compared"]))
    dated = ("--chat_template", CHATML + "{{ strftime_now('%d %b %Y') }}", "--max_length", "128", "--max_steps", "1")
    for rows in (("dense", "hift"), ("dense", "hift", "lora")):
        assert main(["compare", "--rows", *rows, *place, *dated, *UNMEASURED]) == 0
    assert said == ["2026-11-26"] * 3 and days == [26, 27, 28, 29]


def test_a_date_of_a_run_file_that_no_template_writes_is_said_and_not_read(chats: Runs) -> None:
    file = chats["run.yaml"]
    file.write_text("chat_template_date: 2026-01-31\n", encoding="utf-8")
    _, *options = chats.arguments("out", "--max_steps", "1", *UNMEASURED)
    assert main(["train", str(file), *options]) == 0
    line = "chat_template_date=2026-01-31 is not read: no chat template of this run writes today's date"
    assert line in first_lines(chats.printed())
    assert main(["train", str(chats["out"] / "slivertune_run.yaml"), "--output_dir", str(chats["again"])]) == 0
    assert line in first_lines(chats.printed())


def on_day(monkeypatch: pytest.MonkeyPatch, day: int) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: datetime(2026, 11, day, 9)))


@pytest.mark.slow
def test_a_resumed_chat_run_ends_with_the_same_loss(chats: Runs) -> None:
    whole = chats.train("whole", "--save_steps", "3")
    resume = ("--resume_from_checkpoint", str(chats["whole"] / "checkpoint-3"))
    again = chats.train("again", "--save_steps", "3", *resume)
    assert again["after"] == whole["after"]


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (CHATS, (), "the tokenizer has no chat template to write them with. Name one by --chat_template"),
        ([{"message": row["messages"]} for row in CHATS], (), "did you mean 'messages' by 'message'?"),
        ([{"chosen": "a", "rejected": "b"}] * 9, (), "does not tune to preferences. Use TRL's DPOTrainer"),
        (CHATS, ("--dataset_weights", "0.5", "0.5"), "dataset_weights=[0.5, 0.5] has 2 weights for 1 datasets"),
        (CHATS, ("--chat_template", "nowhere"), "chat_template='nowhere' is neither a file nor a template"),
        (
            CHATS,
            ("--chat_template_date", "1.2.2026"),
            "chat_template_date='1.2.2026' is not a date. Write it as 2026-01-31",
        ),
        (QUESTIONS, ("--chat_template_date", "2026-01-31"), "no chat template of this run writes today's date. Leave"),
    ],
)
def test_the_command_ends_with_what_is_wrong_and_the_way_out(
    rows: list[dict[str, Any]],
    more: tuple[str, ...],
    message: str,
    plain_base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", rows)
    assert message in complaint(capsys, train_arguments(plain_base, data, tmp_path / "out", *more))
