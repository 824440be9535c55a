"""What is learned of each format: the labels, decoded, against texts written by hand."""

import json
from datetime import date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

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
    trl_template,
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
    return prepared(splits, tokenizer or chat_tokenizer(), llama_config(positions=1024), **options)


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
    assert task.notes[1].startswith("1 of 2 train conversations became one row per turn of the assistant")


@pytest.mark.parametrize(
    ("rows", "tokenizer", "options", "message"),
    [
        (
            CHAT,
            byte_tokenizer(),
            {},
            r"chat \(messages\), and the tokenizer has no chat template .* --chat_template .*, or use a model",
        ),
        (
            CHAT,
            chat_tokenizer({"tool_use": CHATML}),
            {},
            r"has the chat templates tool_use and none called default\. Name the one to use by --chat_template \(",
        ),
        (
            [{"text": "a"}] * 2,
            byte_tokenizer(),
            {"chat_template": CHATML},
            r"writes chats and instructions, and the rows are text \(text\)\. Leave it out",
        ),
        (
            QUESTIONS,
            chat_tokenizer(),
            {"response_separator": " "},
            r"response_separator=' ' stands between .* rows are question and answer .* chat template\. Leave it out",
        ),
        (ALPACA, byte_tokenizer(), {"response_separator": " "}, r"rows are Alpaca .*\. Leave it out"),
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
            r"no row of the train split can be learned from: .*: the chat template refuses them: never\. Correct",
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
    rows = [{"messages": [{**message, "mood": 1} for message in row["messages"]]} for row in CHAT]
    assert task_of(tmp_path, rows).notes[0].endswith("turns; not read: mood of a message")


def with_key(number: int, key: str, value: Any, role: str = "assistant") -> list[dict[str, Any]]:
    """The chats, whose messages of one role and row have a key."""
    return [
        {"messages": [{**each, key: value} if place == number and each["role"] == role else each for each in messages]}
        for place, messages in enumerate(row["messages"] for row in CHAT)
    ]


@pytest.mark.parametrize("packing", [False, True])
def test_turns_that_are_not_to_be_learned_are_read_and_a_row_without_others_is_dropped(
    packing: bool, tmp_path: Path
) -> None:
    first, second = (row["messages"] for row in CHAT)
    rows = [{"messages": [first[0], {**first[1], "weight": 0}, *first[2:]]}, {"messages": second}]
    assert learned(task_of(tmp_path, rows)) == ["4<|im_end|>\n", "Hello<|im_end|>\n"]
    task = task_of(tmp_path, with_key(0, "train", False), packing=packing, max_length=28)
    assert learned(task) == ["Hello<|im_end|>\n"]
    assert "1 of 2 train rows dropped: no assistant turn that says it is to be learned" in task.notes


@pytest.mark.parametrize(("key", "value"), [("weight", 0), ("train", False), ("loss", False)])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [(SHAREGPT, ["2<|im_end|>\n", "Hello<|im_end|>\n"]), (COMPLETIONS, ["Hello<|im_end|>\n"])],
    ids=["sharegpt", "completions"],
)
def test_turns_of_other_formats_that_are_not_to_be_learned_are_read(
    rows: list[dict[str, Any]], expected: list[str], key: str, value: Any, tmp_path: Path
) -> None:
    first, *others = rows
    column = list(first)[-1]
    *before, last = first[column]
    task = task_of(tmp_path, [{**first, column: [*before, {**last, key: value}]}, *others])
    assert learned(task) == expected
    texts = ["".join(turn(each["role"], each["content"]) for each in row["messages"]) for row in CHAT]
    assert written(task) == texts[-len(expected) :]


@pytest.mark.parametrize(("key", "value"), [("weight", 1), ("weight", 0.5), ("train", "yes"), ("train_detail", [1])])
def test_a_turn_of_somebody_else_that_is_to_be_learned_is_read_and_said(key: str, value: Any, tmp_path: Path) -> None:
    task = task_of(tmp_path, with_key(1, key, value, role="user"))
    assert learned(task)[1] == "Hello<|im_end|>\n"
    line = "1 of 2 train rows: a message that is not the assistant's says that it is to be learned, but is only read"
    assert line in task.notes


def test_what_does_not_say_clearly_whether_it_is_learned_is_an_error_that_names_the_row(tmp_path: Path) -> None:
    message = (
        r"1 of 2 rows of the train split have weight=0.5 in a message, which is neither true, false, 1 nor 0 \(row 1, "
        r"counted from 0\)\. Write weight: 0"
    )
    with pytest.raises(ValueError, match=message):
        task_of(tmp_path, with_key(1, "weight", 0.5))


def test_messages_that_the_template_passes_over_cost_their_row_and_are_counted(tmp_path: Path) -> None:
    spoken = "{% if message['role'] in ('user', 'assistant') %}"
    template = CHATML.replace("<|im_start|>{{", f"{spoken}<|im_start|>{{{{").replace(
        "{% endfor", "{% endif %}{% endfor"
    )
    note = {"role": "system", "content": "1"}
    rows = [
        *CHAT,
        *({"messages": [note, *row["messages"]]} for row in CHAT),
        {"messages": [*CHAT[1]["messages"], note]},
    ]
    task = task_of(tmp_path, rows, chat_tokenizer(template))
    assert learned(task) == ["2<|im_end|>\n4<|im_end|>\n", "Hello<|im_end|>\n"]
    assert "3 of 5 train rows dropped: the chat template leaves out a message of the role 'system'" in task.notes


def test_reasoning_of_earlier_turns_that_the_template_leaves_out_is_counted(tmp_path: Path) -> None:
    content = "message['content']"
    template = CHATML.replace(content, f"{content} if loop.last else {content}.split('</think>')[-1]")
    first, answer, *others = CHAT[0]["messages"]
    thoughtful = {"messages": [first, {**answer, "content": "<think>sum</think>2"}, *others]}
    task = task_of(tmp_path, [*CHAT, thoughtful], chat_tokenizer(template))
    assert "1 of 3 train rows: the chat template leaves out the reasoning of earlier turns" in task.notes


def test_a_chat_with_nothing_in_a_users_turn_is_dropped(tmp_path: Path) -> None:
    rows = [*CHAT, {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "Hello"}]}]
    assert "1 of 3 train rows dropped: a user's turn that says nothing" in task_of(tmp_path, rows).notes


def test_text_that_is_json_itself_and_text_in_parts_are_learned_as_they_are_written(tmp_path: Path) -> None:
    answers = ['"Quoted."', "42", '{"a": 1}', "null", '[{"type": "text", "text": "no part"}]', "2031-03-07"]
    parts = [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]}
        for content in (parts, *answers)
    ]
    task = task_of(tmp_path, rows)
    assert learned(task) == [f"{answer}<|im_end|>\n" for answer in ("in parts", *answers)]
    assert not any("dropped" in note for note in task.notes)


def test_tools_beside_prompts_in_text_are_written_by_the_template_or_said_not_to_be_read(tmp_path: Path) -> None:
    tools = [{"name": "sum", "parameters": {"a": 2.5, "b": None}}]
    template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML
    for second in ("completion", "response"):
        rows = [{"prompt": "1 + 1?", second: "2", "tools": tools}, {"prompt": "2?", second: "2", "tools": None}]
        task = task_of(tmp_path, rows, chat_tokenizer(template))
        assert written(task)[0].startswith(f"{json.dumps(tools[0])}<|im_start|>user")
        assert written(task)[1].startswith("<|im_start|>user")
        assert f"(prompt, {second}, tools)" in task.notes[0] and "not read" not in task.notes[0]
        task = task_of(tmp_path, rows, chat_tokenizer(None))
        assert task.notes[0].endswith("; not read: tools") and f"(prompt, {second})" in task.notes[0]


def test_tools_in_words_cost_no_row_that_a_template_without_tools_writes(tmp_path: Path) -> None:
    task = task_of(tmp_path, [{**row, "tools": "calculator, search"} for row in PROMPTS])
    assert len(task.train_dataset) == 2 and task.notes[0].endswith("; not read: tools")


def test_nulls_are_kept_or_dropped_as_each_split_is_stored(tmp_path: Path) -> None:
    """A table fills in the keys of other rows with nulls. A json file has those that somebody wrote."""
    calls = "{{ message.content }}{{ message.tool_calls | default(0) | tojson }}"
    template = CHATML.replace("{{ message['content'] }}", calls)
    assert template != CHATML

    def chat(arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        return {"messages": [{"role": "user", "content": "?"}, call]}

    rows = [chat({"a": 1, "b": None}), chat({"b": None})]
    written = write(tmp_path / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    stored = str(tmp_path / "rows.parquet")
    datasets.Dataset.from_list([chat({"a": 1}), chat({"b": 2})]).to_parquet(stored)
    for train, evaluation in ((written, stored), (stored, written)):
        splits = splits_from(train, eval_file=evaluation, dataset_cache_dir=str(tmp_path / "cache"))
        task = prepared(splits, chat_tokenizer(template), llama_config(positions=1024))
        texts = {
            file: [chat_tokenizer().decode(row["input_ids"]) for row in split]
            for file, split in ((train, task.train_dataset), (evaluation, task.eval_dataset))
        }
        assert ['"a": 1, "b": null' in text for text in texts[written]] == [True, False]
        assert not any("null" in text for text in texts[stored])


def test_evaluation_rows_of_numbers_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", json.dumps(PROMPTS[0]) + "\n")
    numbers = write(tmp_path / "numbers.jsonl", '{"prompt": "1?", "completion": 1.0}\n')
    splits = splits_from(file, eval_file=numbers, dataset_cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"column 'completion' holds .*float64.*, not text\. .* --eval_file"):
        prepared(splits, chat_tokenizer(), llama_config(positions=1024))


def test_the_end_of_a_turn_is_told_from_a_row_that_is_not_cut(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "long " * 50}]}
    task = task_of(tmp_path, [long, *CHAT], max_length=120, truncate=True)
    assert any(note.startswith("the chat template ends a turn by '<|im_end|>'") for note in task.notes)


DATED = CHATML + "{{ strftime_now('%d %b %Y') }}"


@pytest.mark.parametrize(
    ("name", "form"),
    [("own", "%d %b %Y"), ("llama3_2", "%d %b %Y"), ("gptoss", "%Y-%m-%d"), ("gptoss_training", "%Y-%m-%d")],
)
def test_the_date_that_a_template_writes_is_the_runs(name: str, form: str, tmp_path: Path) -> None:
    tokenizer, texts = chat_tokenizer(DATED if name == "own" else trl_template(name)), list[list[str]]()
    for day in (date(2024, 2, 29), date(2031, 11, 3)):
        task = task_of(tmp_path, CHAT, tokenizer, chat_template_date=str(day))
        texts.append(written(task, tokenizer))
        assert all(day.strftime(form) in text for text in texts[-1])
        assert task.chat_template_date == str(day)
        line = f"the chat template writes the date, which is {day} in this run (--chat_template_date)"
        assert line in task.notes
    assert all(one != other for one, other in zip(*texts, strict=True))


def test_a_date_for_a_template_that_writes_none_is_not_the_runs(tmp_path: Path) -> None:
    assert task_of(tmp_path, CHAT, chat_template_date="2024-02-29").chat_template_date is None


def test_without_a_date_it_is_the_days_and_not_that_of_rows_made_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for day in (26, 27):
        now = SimpleNamespace(now=lambda day=day: datetime(2026, 11, day, 9))
        monkeypatch.setattr(chat_template_utils, "datetime", now)
        texts += [written(task_of(tmp_path, CHAT, chat_tokenizer(DATED)))[1][-11:]]
    assert texts == ["26 Nov 2026", "27 Nov 2026"]


def test_a_generation_prompt_that_the_data_begin_otherwise_is_said(tmp_path: Path) -> None:
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    task = task_of(tmp_path, CHAT, chat_template=template)
    assert learned(task) == ["2<|im_end|>\n4<|im_end|>\n", "Hello<|im_end|>\n"]
    assert any("generation prompt ends by '<think>', which it does not write" in note for note in task.notes)
