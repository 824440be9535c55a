"""Sentences that have to be read twice, by how they begin: none in the pages and the package."""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

WORDS = ("What", "Those", "That", "Which", "Who", "Of", "Where", "How")
PARTS = {
    "AttributeError",
    "ChunkedLossError",
    "DamagedCheckpointError",
    "SilentError",
    "UnknownWeightError",
    "UnsupportedStateError",
    "UnusableRowError",
}
"""Errors whose message is a part of another one, which has the way out, or which nobody reads."""
QUOTES = {"ending", "error", "not_text", "reason", "said", "text", "way_out"}
"""Variables with sentences of another error, or with the way out."""
WITHOUT_WAY_OUT = {
    "core/output_place.py": (1, "cannot_write names it"),
    "core/removed_settings.py": (1, "say_removed names it"),
    "core/saved_state.py": (1, "a part of another message (describe_damage)"),
    "core/transformers_internals.py": (1, "a part of the message on a row that the chat template refuses"),
    "hift/gradient_placeholder.py": (1, "torch calls it, and no user does"),
    "interop/auto_layers.py": (3, "the caller adds to give a number"),
    "parallel/checkpoint/sidecar.py": (2, "a part of another message (describe_damage)"),
    "parallel/zero/rank_file.py": (1, "a part of another message (describe_damage)"),
    "planning/configs.py": (1, "a part of the message on figures that don't hold together"),
    "planning/extension.py": (7, "caught: the whole model is planned instead"),
    "planning/fewer_blocks.py": (1, "caught: the whole model is planned instead"),
    "planning/hift_run.py": (2, "a fault of the plan itself, and one that is caught"),
    "planning/make.py": (1, "caught: the whole model is planned instead"),
    "training/data/json_rows.py": (5, "a part of the message on a file that can't be read"),
    "training/options/parser.py": (2, "names the page of help after a semicolon, as all errors of the parser do"),
    "training/output/planned_update.py": (2, "a part of the note that the time is not planned"),
}
"""Files with messages of one sentence that are neither a rule (`must`) nor quote another error: number and reason."""
MOST_TERMS = 25
WIDE = 160
"""Characters of a table's row that do not fit on a page: a reader scrolls, on a phone more than on a screen."""
MOST_WIDE_ROWS = 10
"""As many as there are today, nearly all of them of measured ranges; it may only fall."""
WITHOUT_COST = {"api", "architecture", "removed", "stability", "troubleshooting"}
"""Pages to look something up in: nobody pays for what stands there."""
PER = re.compile(
    r"\b(?:tokens|bytes|updates|seconds|rows|layers|weights|sequences|times|GB|GiB) an? \w+", re.IGNORECASE
)
"""A rate that is written with "a": 4 sequences a step."""
_CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^ *(?:Args|Attributes|Examples?|Raises|Returns|Yields):$", re.MULTILINE)
_ENTRY = re.compile(r"^ +\*{0,2}\w+: ", re.MULTILINE)


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a text in Markdown, each in one line; headings and code are none."""
    blocks = re.split(r"\n\s*\n|\n\s*(?=(?:[-*]|\d+\.) )|^\|.*\|$", _CODE.sub("", text), flags=re.MULTILINE)
    for block in (re.sub(r"^(?:[-*]|\d+\.|>) ", "", " ".join(each.split())) for each in blocks):
        if block and not block.startswith("#"):
            yield block


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text in Markdown."""
    for paragraph in paragraphs(text):
        yield from re.split(r"(?<=[.!?:])\s+(?=[A-Z`*])", paragraph)


def begin_wrongly(text: str) -> list[str]:
    """Sentences whose subject comes late: they begin by a relative pronoun or the like. Questions are well."""
    found = [each for each in sentences(text) if re.match(rf"[*_`]*(?:{'|'.join(WORDS)})\b", each)]
    return [each for each in found if not each.endswith("?")]


def as_written(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module, its classes, functions and attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield str(statement.value.value)


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file, each part of them as a paragraph."""
    for text in as_written(path):
        yield _ENTRY.sub("\n\n", _SECTION.sub("\n\n", text))


def summary(docstring: str) -> str:
    """Return the first paragraph of a docstring in one line. An option's help text is such a paragraph."""
    return " ".join(re.split(r"\n\s*\n", docstring.strip())[0].split())


def test_paragraphs_and_items_are_told_apart() -> None:
    text = "# Title\n\nOne\nparagraph.\n- an\n  item\n- another\n\n| a | table |\n\n```\ncode\n\nand more\n```\n\nLast."
    assert list(paragraphs(text)) == ["One paragraph.", "an item", "another", "Last."]


@pytest.fixture
def pages(checkout: Path) -> list[Path]:
    return [checkout / "README.md", *sorted((checkout / "docs").glob("*.md"))]


@pytest.fixture
def texts(checkout: Path, pages: list[Path]) -> list[Path]:
    others = ("CONTRIBUTING.md", "CHANGELOG.md", "launch/README.md", "benchmarks/README.md")
    return [*pages, *(checkout / name for name in others)]


def test_pages_begin_no_sentence_by_a_relative_clause(texts: list[Path]) -> None:
    found = [f"{page.name}: {each}" for page in texts for each in begin_wrongly(page.read_text(encoding="utf-8"))]
    assert found == []


def test_pages_write_rates_with_per(texts: list[Path]) -> None:
    found = [
        f"{page.name}: {each}"
        for page in texts
        for each in PER.findall(" ".join(_CODE.sub("", page.read_text(encoding="utf-8")).split()))
    ]
    assert found == []


RATES = re.compile(
    r"\b(?:tokens|bytes|updates|seconds|rows|layers|sequences|GB|GiB) an? "
    r"(?:second|hour|step|update|forward|group|turn|cycle|seed|row|rank|process)\b",
    re.IGNORECASE,
)
"""The same in code, whose sentences may go on with "a" behind such a word."""


def test_texts_that_are_printed_write_rates_with_per(checkout: Path) -> None:
    folders = ("integrations/slivertune", "examples", "benchmarks")
    files = [file for folder in folders for file in sorted((checkout / folder).rglob("*.py"))]
    found = [
        f"{file.name}: {each}"
        for file in files
        for text in strings(file)
        for each in RATES.findall(" ".join(text.split()))
    ]
    assert len(files) > 350 and found == []


def strings(path: Path) -> Iterator[str]:
    """Yield the texts of a file, docstrings among them; parts of a text in braces are left out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("Layers a group", True),
        ("0.1 seconds a step", True),
        ("4 rows per forward", False),
        ("it gives the tokens a mask", False),
    ],
)
def test_rates_with_a_are_found(text: str, is_found: bool) -> None:
    assert bool(RATES.search(text)) == is_found


def test_no_paragraph_is_longer_than_four_lines_of_a_hundred_characters(pages: list[Path]) -> None:
    found = [
        f"{page.name}: {paragraph[:60]}..."
        for page in pages
        for paragraph in paragraphs(page.read_text(encoding="utf-8"))
        if len(textwrap.wrap(paragraph, 100)) > 4
    ]
    assert found == []


def rows_shown(text: str) -> Iterator[str]:
    """Yield the rows of a page's tables as they are read: links by their words, and no marks of code or bold text."""
    for line in _CODE.sub("", text).splitlines():
        if line.startswith("|") and not set(line) <= set("|-: "):
            shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", line).replace("`", "").replace("**", "")
            yield "  ".join(cell.strip() for cell in re.split(r"(?<!\\)\|", shown.strip("|")))


def test_the_rows_of_a_table_are_shown_without_marks() -> None:
    assert list(rows_shown("| A | B |\n|---|---|\n| [a `b`](c.md) | **d**: e |\n\n```\n| code |\n```\n")) == [
        "A  B",
        "a b  d: e",
    ]


def test_few_rows_of_tables_are_wider_than_a_page(pages: list[Path]) -> None:
    wide = [
        f"{page.name}: {row}"
        for page in pages
        for row in rows_shown(page.read_text(encoding="utf-8"))
        if len(row) > WIDE
    ]
    assert len(wide) <= MOST_WIDE_ROWS, "\n".join(wide)


def test_each_page_that_is_used_says_at_its_top_what_it_costs(pages: list[Path]) -> None:
    docs = [page for page in pages if page.parent.name == "docs"]
    tops = {page.stem: re.split(r"^(?:##|```|\|)", page.read_text("utf-8"), maxsplit=1, flags=re.M)[0] for page in docs}
    silent = {name for name, top in tops.items() if not re.search(r"\bcosts?\b", top)}
    assert silent == WITHOUT_COST


def test_the_readme_says_in_forty_lines_what_why_for_whom_not_with_what_and_how_to_start(pages: list[Path]) -> None:
    top = "\n".join(pages[0].read_text(encoding="utf-8").splitlines()[:40])
    parts = [
        "fine-tunes models whose weights fit",
        "**Why:**",
        "**For whom not:**",
        "**Requirements:**",
        "**Start**",
        "make train",
    ]
    places = [top.find(part) for part in parts]
    assert -1 not in places and places == sorted(places)
    assert re.search(r"[\d,]+ tokens/s", top[places[1] : places[2]])  # a figure says why


def terms(checkout: Path) -> dict[str, str]:
    """Meanings of the glossary's terms."""
    text = (checkout / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = re.findall(
        r"^\| (.+?) \| (.+) \|$", text.partition("\n## Glossary\n")[2].partition("\n## ")[0], re.MULTILINE
    )
    return dict(table[1:])


def test_the_glossary_is_short_and_explains_the_abbreviations_of_the_pages(checkout: Path) -> None:
    found = terms(checkout)
    assert {"layer", "turn", "delta"} < found.keys() and len(found) <= MOST_TERMS
    assert "accumulated gradients" in found["AG, MA"] and "momentum" in found["AG, MA"]
    assert "m is their number" in found["group"]


def test_the_readme_has_no_abbreviation_that_the_glossary_explains(pages: list[Path]) -> None:
    assert re.findall(r"\b(?:AG|MA)\b|\bm = ", pages[0].read_text(encoding="utf-8")) == []


def test_the_readme_is_short(pages: list[Path]) -> None:
    lines = pages[0].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120 and max(len(each) for each in lines if not each.startswith("|")) <= 120


def test_no_docstring_has_a_sentence_that_begins_by_a_relative_clause(checkout: Path) -> None:
    files = sorted((checkout / "integrations" / "slivertune").rglob("*.py"))
    found = [f"{file.name}: {each}" for file in files for text in docstrings(file) for each in begin_wrongly(text)]
    assert len(files) > 300 and found == []


def test_no_summary_of_a_docstring_has_a_semicolon(checkout: Path) -> None:
    files = sorted((checkout / "integrations" / "slivertune").rglob("*.py"))
    found = [f"{file.name}: {each}" for file in files for text in as_written(file) if ";" in (each := summary(text))]
    assert len(files) > 300 and found == []


def messages(source: str) -> Iterator[ast.expr]:
    """Yield the texts of the errors that a file raises, except those that are a part of another message."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            name = ast.unparse(node.exc.func)
            if name.endswith("Error") and name not in PARTS:
                yield node.exc.args[0]


def without_way_out(source: str) -> list[str]:
    """Return the messages of a file that state a fact and no way out: one sentence that is no rule."""
    found = []
    for message in messages(source):
        parts = message.values if isinstance(message, ast.JoinedStr) else [message]
        fields = [each for each in parts if isinstance(each, ast.FormattedValue)]
        if not all(isinstance(each, (ast.FormattedValue, ast.Constant)) for each in parts):
            continue  # a text that is made elsewhere
        text = "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in parts)
        names = {node.id for each in fields if each.conversion < 0 for node in ast.walk(each) if _is_name(node)}
        if not (re.search(r"[.?] +\S| must ", text) or names & QUOTES or " " not in text):
            found.append(text)
    return found


def _is_name(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def test_each_error_has_a_way_out_or_stands_in_the_list_with_a_reason(checkout: Path) -> None:
    package = checkout / "integrations" / "slivertune"
    files = {path.relative_to(package).as_posix(): path for path in sorted(package.rglob("*.py"))}
    told = ((name, without_way_out(path.read_text(encoding="utf-8"))) for name, path in files.items())
    found = {name: texts for name, texts in told if texts}
    # A file that needs no reason any more leaves the list.
    numbers = {name: len(texts) for name, texts in found.items()}
    assert numbers == {name: number for name, (number, _) in WITHOUT_WAY_OUT.items()}, found


@pytest.mark.parametrize(
    ("raised", "is_found"),
    [
        ('ValueError(f"{path} is empty")', True),
        ('ValueError(f"{path} is empty. Give a file with rows")', False),
        ('ValueError(f"{name}={value} must be at least 1")', False),
        ('ValueError(f"{path} can\'t be read: {error}")', False),
        ('ValueError(f"{text!r} is no number")', True),
        ('ValueError("it is empty" if rows else "there is none")', False),
        ('UnusableRowError("nothing in a column")', False),
    ],
)
def test_an_error_without_a_way_out_is_found(raised: str, is_found: bool) -> None:
    assert bool(without_way_out(f"raise {raised}")) == is_found


def test_a_summary_is_the_first_paragraph_of_a_docstring() -> None:
    text = """
    Size in bytes; 0
    for none.

    More about it; no summary.
    """
    assert summary(text) == "Size in bytes; 0 for none."


@pytest.mark.parametrize(
    ("text", "num_found"),
    [
        ("What waits is written back. The rest stays.", 1),
        ("The rest stays. Of these, two are kept.", 1),
        ("# What it costs\n\nNothing.", 0),
        ("What does it cost? Nothing.", 0),
        ("- *Where* a card is missing, nothing runs.\n- That is all.", 2),
        ("```\nWhat is code\n```", 0),
        ("If memory is short, offload. Whatever trains is resident.", 0),
    ],
)
def test_sentences_are_counted(text: str, num_found: int) -> None:
    assert len(begin_wrongly(text)) == num_found
