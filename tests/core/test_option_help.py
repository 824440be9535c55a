import pytest

from slivertune.core.option_help import HelpEntry, HelpGroup, describe_option, render_help


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            describe_option(["--seed"], "Of all that is drawn.", value="N", default=42),
            "of all that is drawn (default: 42)",
        ),
        (describe_option(["--rate"], "a rate; 1e-3 by default", default=1e-3), "a rate; 1e-3 by default"),
        (describe_option(["--x"], "what is there, ...", default=None), "what is there, ..."),
        (describe_option(["--x"], "PEFT's. 20%% more", default=False), "PEFT's. 20% more"),
        (describe_option(["--x"], "on", default=True), "on (default: true)"),
        (describe_option(["--x"], "none", default=0), "none (default: 0)"),
        (describe_option(["--x"], "words", default=[]), "words"),
    ],
)
def test_a_text_is_a_clause_with_its_default(entry: HelpEntry, expected: str) -> None:
    assert entry.text == expected


def test_choices_stand_beside_the_option_or_in_the_text_where_they_are_long() -> None:
    assert describe_option(["--order"], "order", choices=["up", "down"]).invocation == "--order {up,down}"
    long = [f"choice_{number}" for number in range(6)]
    entry = describe_option(["--order", "--ordering"], "order", choices=long)
    assert (entry.invocation, entry.text) == ("--order NAME, --ordering", f"order; one of {', '.join(long)}")
    told = describe_option(["--order"], f"either of {'; '.join(long)}", choices=long)
    assert "one of" not in told.text


def test_lines_end_between_words_and_commands_go_on_behind_a_backslash() -> None:
    text = render_help(
        usage="tool [--option value]",
        description="Does something well-known to a very-long-hyphenated-word-that-is-not-broken.",
        examples=["tool --first one two --second value --third value --fourth value", "tool"],
        groups=[
            HelpGroup("one", [HelpEntry("--short N", "the text of it"), HelpEntry("--a_much_longer_name N", "text")]),
            HelpGroup("two", [HelpEntry("--bare", "")]),
        ],
        notes=["A note."],
        width=44,
    )
    assert (
        text
        == """\
usage: tool [--option value]

Does something well-known to a
very-long-hyphenated-word-that-is-not-broken.

examples:
  tool --first one two --second value \\
      --third value --fourth value
  tool

one:
  --short N             the text of it
  --a_much_longer_name N
                        text

two:
  --bare

A note.
"""
    )
