"""What is learned of each format: the labels, decoded, against texts written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from slivertune.training.tasks.task import Task
from slivertune.training.tasks.tokenization import IGNORED
from tests.training.tiny import (
    CHATML,
    MARKED,
    byte_tokenizer,
    chat_tokenizer,
    llama_config,
    prepared,
    splits_from,
    write,
)

CHAT = [
    {"messages": [
        {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"},
    ]},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
]  # fmt: skip
SHAREGPT = [
    {"conversations": [
        {"from": {"user": "human", "assistant": "gpt"}[message["role"]], "value": message["content"]}
        for message in row["messages"]
    ]}
    for row in CHAT
]  # fmt: skip
COMPLETIONS = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in CHAT]
ALPACA = [
    {"instruction": "Add.", "input": "1 and 2", "output": "3"},
    {"instruction": "Greet.", "input": "", "output": "Hello"},
    {"instruction": "Bow.", "input": None, "output": "*"},
]
QUESTIONS = [
    {"question": "Two {x} and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "One?", "answer": "#### 1"},
]
PROMPTS = [{"prompt": row["question"], "completion": row["answer"]} for row in QUESTIONS]


def task_of(
    folder: Path, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast | None = None, **options: Any
) -> Task:
    """Rows of a jsonl file, which are evaluated on, too."""
    file = write(folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    splits = splits_from(file, eval_file=file, dataset_cache_dir=str(folder / "cache"))
    return prepared(splits, tokenizer or chat_tokenizer(), llama_config(positions=512), **options)


def learned(task: Task, tokenizer: PreTrainedTokenizerFast | None = None) -> list[str]:
    """The labels of each row as text."""
    tokenizer = tokenizer or chat_tokenizer()
    return [tokenizer.decode([label for label in row["labels"] if label != IGNORED]) for row in task.train_dataset]


def written(task: Task, tokenizer: PreTrainedTokenizerFast | None = None) -> list[str]:
    return [(tokenizer or chat_tokenizer()).decode(row["input_ids"]) for row in task.train_dataset]


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


@pytest.mark.parametrize(
    ("rows", "said", "expected"),
    [
        (CHAT, "chat (messages); loss on the assistant's turns", ["2<|im_end|>\n4<|im_end|>\n", "Hello<|im_end|>\n"]),
        (
            SHAREGPT,
            "ShareGPT (conversations); loss on the assistant's turns",
            ["2<|im_end|>\n4<|im_end|>\n", "Hello<|im_end|>\n"],
        ),
        (
            COMPLETIONS,
            "prompt and completion (prompt, completion); loss on the completion",
            ["4<|im_end|>\n", "Hello<|im_end|>\n"],
        ),
    ],
)
def test_of_a_chat_the_assistants_words_are_learned(
    rows: list[dict[str, Any]], said: str, expected: list[str], tmp_path: Path
) -> None:
    task = task_of(tmp_path, rows)
    assert learned(task) == expected
    assert written(task) == [
        "".join(turn(message["role"], message["content"]) for message in row["messages"]) for row in CHAT
    ]
    assert task.notes[0] == f"read as {said}"
    assert task.train_dataset.column_names == ["input_ids", "labels"]


def test_of_a_chat_with_a_marking_template_the_marked_words_are_learned(tmp_path: Path) -> None:
    task = task_of(tmp_path, CHAT, chat_tokenizer(None), chat_template=MARKED)
    assert learned(task) == ["2<|im_end|>4<|im_end|>", "Hello<|im_end|>"]
    assert task.chat_template == MARKED


@pytest.mark.parametrize(
    ("rows", "said", "prompts", "responses"),
    [
        (
            ALPACA,
            "Alpaca (instruction, output, input), written by the chat template; loss on the output",
            ["Add.\n\n1 and 2", "Greet.", "Bow."],
            ["3", "Hello", "*"],
        ),
        *(
            (
                rows,
                f"{name}, written by the chat template; loss on the {target}",
                [row["question"] for row in QUESTIONS],
                [row["answer"] for row in QUESTIONS],
            )
            for rows, name, target in (
                (PROMPTS, "prompt and completion (prompt, completion)", "completion"),
                (QUESTIONS, "question and answer (question, answer)", "answer"),
            )
        ),
    ],
)
def test_of_instructions_in_a_template_the_response_is_learned(
    rows: list[dict[str, Any]], said: str, prompts: list[str], responses: list[str], tmp_path: Path
) -> None:
    task = task_of(tmp_path, rows)
    assert learned(task) == [f"{response}<|im_end|>\n" for response in responses]
    assert written(task) == [
        turn("user", prompt) + turn("assistant", response) for prompt, response in zip(prompts, responses, strict=True)
    ]
    assert task.notes[0] == f"read as {said}"


WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n"
    "### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)
ALPACA_TEXTS = [WITH_INPUT, WITHOUT_INPUT.format("Greet."), WITHOUT_INPUT.format("Bow.")]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(
    ("rows", "options", "prompts", "responses"),
    [
        (ALPACA, {}, ALPACA_TEXTS, ["3", "Hello", "*"]),
        *(
            (rows, options, [row["question"] + separator for row in QUESTIONS], [row["answer"] for row in QUESTIONS])
            for rows in (PROMPTS, QUESTIONS)
            for options, separator in (({}, "\n"), ({"response_separator": " => "}, " => "))
        ),
    ],
)
def test_without_a_template_instructions_are_plain_text_and_the_response_with_the_end_of_text_is_learned(
    rows: list[dict[str, Any]],
    options: dict[str, Any],
    prompts: list[str],
    responses: list[str],
    bos: bool,
    tmp_path: Path,
) -> None:
    tokenizer = byte_tokenizer(bos=bos)
    task = task_of(tmp_path, rows, tokenizer, **options)
    assert learned(task, tokenizer) == [f"{response}<eos>" for response in responses]
    texts = zip(prompts, responses, strict=True)
    assert written(task, tokenizer) == [
        f"{'<bos>' if bos else ''}{prompt}{response}<eos>" for prompt, response in texts
    ]
    kind = "the Alpaca prompt" if rows is ALPACA else "plain text"
    assert f", written as {kind} since the tokenizer has no chat template; loss on the " in task.notes[0]


def test_columns_that_a_user_named_are_plain_text_unless_a_template_was_named_too(tmp_path: Path) -> None:
    named = {"prompt_column": "question", "response_column": "answer"}
    plain = task_of(tmp_path, QUESTIONS, **named)
    assert written(plain) == [f"{row['question']}\n{row['answer']}<eos>" for row in QUESTIONS]
    task = task_of(tmp_path, QUESTIONS, chat_tokenizer(None), chat_template=CHATML, **named)
    assert written(task) == [turn("user", row["question"]) + turn("assistant", row["answer"]) for row in QUESTIONS]


def test_packed_chats_keep_their_labels(tmp_path: Path) -> None:
    task = task_of(tmp_path, CHAT, packing=True, max_length=60)
    (text,) = written(task)
    assert text.startswith("".join(turn(message["role"], message["content"]) for message in CHAT[0]["messages"]))
    assert text.endswith("<|im_start|>user\nHi")
    assert learned(task) == ["2<|im_end|>\n4<|im_end|>\n"]


def test_rows_that_nothing_is_learned_from_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user, assistant = ({"role": role, "content": "x" * 20} for role in ("user", "assistant"))
    rows: list[dict[str, Any]] = [
        *CHAT,
        {"messages": []},
        {"messages": None},
        {"messages": [user]},
        {"messages": [{"role": "user"}, assistant]},
        {"messages": [{**user, "content": "y" * 100}, assistant]},
        {"messages": [{"content": "z"}, assistant]},
    ]
    task = task_of(tmp_path, [{**row, "id": 1} for row in rows], max_length=64, truncate=True)
    assert learned(task) == ["2<|im_end|>\n4<|im_end|>\n", "Hello<|im_end|>\n"]
    assert task.notes[0] == "read as chat (messages); loss on the assistant's turns; not read: id"
    assert {note for note in task.notes[1:] if "dropped" in note} == {
        f"{count} of 8 {split} rows dropped: {reason}"
        for split in ("train", "eval")
        for count, reason in (
            (2, "nothing in column 'messages'"),
            (2, "a message without a role or without content"),
            (1, "no assistant turn"),
            (1, "no assistant token within max_length=64"),
        )
    }
    assert "1 of 8 rows of the train split are longer than max_length=64 tokens" in caplog.text


def test_empty_fields_and_unknown_speakers_are_dropped_by_name(tmp_path: Path) -> None:
    task = task_of(tmp_path, [*ALPACA, {"instruction": " ", "input": "", "output": "x"}])
    assert task.notes[1] == "1 of 4 train rows dropped: nothing in column 'instruction'"
    (first, *_) = SHAREGPT
    unknown = {"conversations": [{"from": "narrator", "value": "Once"}, *first["conversations"]]}
    task = task_of(tmp_path, [*SHAREGPT, unknown])
    assert task.notes[1].startswith("1 of 3 train rows dropped: a message from 'narrator', which is none of human,")


def test_of_many_reasons_the_most_frequent_are_said_and_the_others_counted(tmp_path: Path) -> None:
    strangers = [
        {"conversations": [{"from": f"stranger {number}", "value": "?"}, *SHAREGPT[0]["conversations"]]}
        for number in (1, 2, 3, 4, 5, 5, 6, 7)
    ]
    notes = [note for note in task_of(tmp_path, [*SHAREGPT, *strangers]).notes if " train rows dropped" in note]
    assert notes[0].startswith("2 of 10 train rows dropped: a message from 'stranger 5'")
    assert len(notes) == 6 and notes[-1] == "2 of 10 train rows dropped for other reasons"


def test_conversations_that_become_several_rows_are_counted(tmp_path: Path) -> None:
    # An answer ends otherwise where it is the last.
    mark = "{% if loop.last and message['role'] == 'assistant' %}!{% endif %}"
    template = CHATML.replace("<|im_end|>", f"{mark}<|im_end|>")
    task = task_of(tmp_path, CHAT, chat_tokenizer(template))
    assert learned(task) == ["2!<|im_end|>\n", "4!<|im_end|>\n", "Hello!<|im_end|>\n"]
    assert task.notes[1].startswith("1 of 2 train conversations became a row for each of the assistant's turns")


@pytest.mark.parametrize(
    ("rows", "tokenizer", "options", "message"),
    [
        (
            CHAT,
            byte_tokenizer(),
            {},
            r"chat \(messages\), and the tokenizer has no chat template .* --chat_template .*, or take a model",
        ),
        (
            [{"text": "a"}] * 2,
            byte_tokenizer(),
            {"chat_template": CHATML},
            r"writes chats and instructions, and the rows are text \(text\); leave it out",
        ),
        (
            QUESTIONS,
            chat_tokenizer(),
            {"response_separator": " "},
            "response_separator=' ' stands between .* rows are question and answer .* by a chat template; leave it out",
        ),
        (ALPACA, byte_tokenizer(), {"response_separator": " "}, "rows are Alpaca .*; leave it out"),
        (
            CHAT,
            chat_tokenizer(),
            {"max_length": 8},
            "2 of 2 rows of the train split are longer than max_length=8 tokens",
        ),
        (
            CHAT,
            chat_tokenizer(),
            {"max_length": 8, "truncate": True},
            "no row of the train split can be learned from: 2 of 2 train rows dropped: no assistant token within",
        ),
        (
            CHAT,
            chat_tokenizer("{{ raise_exception('never') }}"),
            {},
            "no row of the train split can be learned from: .*: the chat template refuses them: never; correct",
        ),
    ],
)
def test_rows_that_can_not_be_written_or_learned_are_refused_with_the_way_out(
    rows: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerFast,
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=message):
        task_of(tmp_path, rows, tokenizer, **options)


def test_keys_of_messages_that_are_not_written_are_named(tmp_path: Path) -> None:
    rows = [{"messages": [{**message, "weight": 1} for message in row["messages"]]} for row in CHAT]
    assert task_of(tmp_path, rows).notes[0].endswith("turns; not read: weight of a message")


def test_a_generation_prompt_that_the_data_begin_otherwise_is_said(tmp_path: Path) -> None:
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    task = task_of(tmp_path, CHAT, chat_template=template)
    assert learned(task) == ["2<|im_end|>\n4<|im_end|>\n", "Hello<|im_end|>\n"]
    assert any("generation prompt ends by '<think>', which it does not write" in note for note in task.notes)
