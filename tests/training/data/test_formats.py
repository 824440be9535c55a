from typing import Any

import datasets
import pytest

from slivertune.training.data.columns import number_rows
from slivertune.training.data.formats import find_format, unread_columns, unread_keys
from slivertune.training.options.arguments import DataArguments

OPENAI = [[{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]] * 2
SHAREGPT = [[{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]] * 2


def table(*columns: str, **values: list[Any]) -> Any:
    return number_rows(datasets.Dataset.from_dict({**{column: ["a", "b"] for column in columns}, **values}))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (table("id", "text"), "text (text)"),
        (table("story"), "text (story)"),
        (table("mr", "ref"), "prompt and response (mr, ref)"),
        (table("id", messages=OPENAI), "chat (messages)"),
        (table(messages=SHAREGPT), "chat (messages)"),
        (table("prompt", "tools", messages=OPENAI), "chat (messages, tools)"),
        (table("source", conversations=SHAREGPT), "ShareGPT (conversations)"),
        (table("instruction", "output", "id"), "Alpaca (instruction, output)"),
        (table("instruction", "input", "output"), "Alpaca (instruction, output, input)"),
        # An optional column that says nothing has no type that could be checked.
        (table("instruction", "output", input=[None, None]), "Alpaca (instruction, output)"),
        (table("prompt", "completion"), "prompt and completion (prompt, completion)"),
        (table("prompt", "response"), "prompt and completion (prompt, response)"),
        (table(prompt=OPENAI, completion=OPENAI), "prompt and completion (prompt, completion)"),
        (table("question", "answer"), "question and answer (question, answer)"),
        # Stanford's Alpaca has the same again, written out.
        (
            table(instruction=["Add.", "Go."], output=["2", ""], text=["### Add.\n2", "### Go.\n"]),
            "Alpaca (instruction, output)",
        ),
    ],
)
def test_a_format_is_found_by_its_columns(rows: Any, said: str) -> None:
    assert str(find_format(DataArguments(), rows)) == said


@pytest.mark.parametrize(
    ("options", "rows", "said"),
    [
        ({"text_column": "b"}, table("a", "b"), "text (b)"),
        # By name even what looks like a format is plain text.
        (
            {"prompt_column": "question", "response_column": "answer"},
            table("question", "answer"),
            "prompt and response (question, answer)",
        ),
        ({"dataset_format": "alpaca"}, table("instruction", "input", "output", "text"), "Alpaca (instruction, output"),
        ({"dataset_format": "messages"}, table("text", messages=OPENAI), "chat (messages)"),
        ({"dataset_format": "question_answer"}, table("question", "context", "answer"), "question and answer"),
    ],
)
def test_what_is_named_wins_over_what_the_columns_look_like(options: dict[str, Any], rows: Any, said: str) -> None:
    assert str(find_format(DataArguments(**options), rows)).startswith(said)


def test_columns_that_are_not_read_are_known() -> None:
    rows = table("id", "source", messages=OPENAI)
    assert unread_columns(find_format(DataArguments(), rows), rows) == ["id", "source"]


@pytest.mark.parametrize(
    ("options", "rows", "message"),
    [
        (
            {},
            table(messages=OPENAI, loss_mask=[[0, 1]] * 2),
            r"look like chat \(messages, tools\), which leaves out loss_mask\. Move its content",
        ),
        # What could mean several things is not guessed.
        (
            {},
            table("text", "content"),
            r"\(text, content\) could be text or content\. Name what to read with --text_column, or [^.;]+_column$",
        ),
        (
            {},
            table(instruction=["Add.", "Go."], output=["2", "3"], text=["### Add.\n2", "### Go.\n"]),
            r"could be instruction\+output or text",
        ),
        ({}, table("prompt", "response", text=["c", "d"]), r"could be prompt\+response or text"),
        (
            {},
            table("instruction", "input", "output", text=["c", "d"]),
            r"could be instruction\+output or text\. .*, or --dataset_format alpaca$",
        ),
        (
            {},
            table("instruction", "output", messages=OPENAI),
            r"could be messages or instruction\+output\. .* or --dataset_format messages or alpaca$",
        ),
        # Near misses.
        (
            {},
            table("mr", "reference"),
            r"\(mr, reference\) give no plain choice\. .* Formats known by their columns are messages \(of role and",
        ),
        ({}, table("id", message=OPENAI), r"did you mean 'messages' by 'message'\? Rename what is misspelt$"),
        ({}, table(conversation=SHAREGPT), "did you mean 'conversations' by 'conversation'"),
        ({}, table("instructions", "outputs"), "mean 'instruction' by 'instructions', 'output' by 'outputs'"),
        ({}, table("Question", "Answer"), "mean 'question' by 'Question', 'answer' by 'Answer'"),
        # Only a part of what the answer depends on would be read.
        (
            {},
            table("question", "context", "answer"),
            r"look like question and answer .*leaves out context\. .*without it by --dataset_format question_answer",
        ),
        ({}, table("system", conversations=SHAREGPT), r"leaves out system\. .*--dataset_format sharegpt"),
        ({}, table("system_prompt", messages=OPENAI), r"leaves out system_prompt\. .*--dataset_format messages"),
        (
            {"dataset_format": "alpaca"},
            table("prompt", "output"),
            r"alpaca reads instruction \+ output, and .* prompt, ",
        ),
        (
            {"text_column": "three"},
            table("one", "two"),
            r"--text_column names the column 'three'.* Name one of its columns: one, two \(if",
        ),
        (
            {"prompt_column": "one", "response_column": "three"},
            table("one", "two"),
            "--response_column names the column 'three'",
        ),
        (
            {"text_column": "Txt"},
            table("id", "text"),
            r"'Txt', which is not in .* \(did you mean 'text'\?\)\. Name one",
        ),
        ({}, table(text=[1, 2]), r"column 'text' holds .*int64.*, not text"),
        ({}, table("question", answer=[1, 2]), r"column 'answer' holds .*int64.*, not text"),
        ({}, table("messages"), r"'messages' should hold lists of messages, .* its first value begins 'a'\. Write"),
        ({}, table(conversations=[["a"], ["b"]]), r"'conversations' should hold lists of messages"),
        ({}, table(messages=[None, []]), "column 'messages' has no messages in any row"),
        # Preferences.
        (
            {},
            table("prompt", "chosen", "rejected"),
            r"columns chosen and rejected are preferences, .*TRL's DPOTrainer .*with HiFT or SFT by slivertune.attach",
        ),
        (
            {"dataset_format": "prompt_completion"},
            table("prompt", "completion", label=[True, False]),
            "columns completion and label are preferences",
        ),
    ],
)
def test_columns_of_no_plain_format_are_an_error_with_the_way_out(
    options: dict[str, Any], rows: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find_format(DataArguments(**options), rows)


def test_nulls_are_the_datas_own_where_messages_are_no_rows_of_a_table() -> None:
    of_table = table(messages=[[*OPENAI[0], {"role": "tool", "content": "3", "name": "sum"}]])
    call = {"role": "assistant", "tool_calls": [{"arguments": {"a": None}}]}
    features = datasets.Features(messages=datasets.List(datasets.Json()))
    of_json = number_rows(datasets.Dataset.from_dict({"messages": [[call]]}, features=features))
    assert [find_format(DataArguments(), rows).keeps_nulls for rows in (of_table, of_json)] == [False, True]


@pytest.mark.parametrize(("template", "unread"), [("", ["mood", "name"]), ("{{ m['name'] }} renamed", ["mood"])])
def test_what_a_template_does_not_write_of_a_message_is_unread(template: str, unread: list[str]) -> None:
    rows = table(messages=[[{"role": "user", "content": "a", "mood": 0.0, "weight": 0.0, "name": "b", "none": None}]])
    assert unread_keys(find_format(DataArguments(), rows), rows, template) == unread
    rows = table("question", "answer")
    assert unread_keys(find_format(DataArguments(), rows), rows, template) == []
