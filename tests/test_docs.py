"""The pages: their site, their code, the errors that they quote, their figures."""

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from sphinx.cmd.build import main as sphinx_main
from transformers import Trainer

import slivertune
from tests.conftest import CHECKOUT
from tests.helpers.launching import run_here
from tests.helpers.models import VOCAB, tiny_llama
from tests.training.tiny import quiet_arguments

DOCS = CHECKOUT / "docs"
PACKAGE = Path(slivertune.__file__).parent


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Sphinx's extensions call what Sphinx deprecates
def test_the_site_is_built_without_a_warning_and_has_every_page(tmp_path: Path) -> None:
    assert sphinx_main(["-q", "-W", "-b", "html", str(DOCS), str(tmp_path / "site")]) == 0
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert pages >= {path.stem for path in DOCS.glob("*.md")}
    api = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert all(f'id="slivertune.{name}"' in api for name in public_names())
    assert "fp32 masters" in api
    members = re.findall(r'id="slivertune\.([\w.]+)"', api)
    assert not [each for each in members if re.search(r"(^|\.)_|refusal_to|without_state", each)]
    assert "<cite>" not in api  # code in a docstring would be in italics
    assert "lr" in re.findall(r'id="slivertune\.SFT">(.*?)</dt>', api, re.DOTALL)[0]  # a class has its signature
    assert dead_links(tmp_path / "site") == []


def dead_links(site: Path) -> list[str]:
    """Links between pages to a page or a heading that is not there."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in site.glob("*.html")}
    ids = {name: set(re.findall(r'\sid="([^"]+)"', text)) for name, text in texts.items()}
    found = []
    for name, text in texts.items():
        article = text.partition("<article")[2].partition("</article>")[0]
        for link in re.findall(r'href="(?!https?:|mailto:)([^"]+)"', article):
            page, _, anchor = link.partition("#")
            known = ids.get(page or name)
            is_dead = not (site / page).exists() if known is None else anchor not in {"", *known}
            if is_dead:
                found.append(f"{name}: {link}")
    return found


def public_names() -> list[str]:
    return [name for name in slivertune.__all__ if not name.startswith("__")]


def test_the_reference_has_each_public_name_once() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    found = re.findall(r"auto(?:class|function):: slivertune\.(\w+)$", page, re.MULTILINE)
    assert sorted(found) == sorted(public_names())


def test_each_page_is_in_the_sites_contents() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = {name for block in re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL) for name in block.split()}
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert pages <= listed, sorted(pages - listed)


def python_blocks() -> list[Any]:
    found = []
    for page in (CHECKOUT / "README.md", DOCS / "coming-from.md"):
        title = f"# {page.stem}"
        for part in re.split(r"^(## .*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            title = part if part.startswith("## ") else title
            for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)):
                found.append(pytest.param(block, id=f"{title.strip('# ')}-{number}"))
    return found


# PEFT 0.21 asks by the name that transformers 5.23 retires.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("block", python_blocks())
def test_each_block_of_python_runs_and_trains(block: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCAB, (24, 16))]
    model = tiny_llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_strategy": "no"}
    arguments = quiet_arguments(tmp_path, **settings)
    loader = [{"input_ids": row["input_ids"][None], "labels": row["labels"][None]} for row in rows[:6]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scope: dict[str, Any] = {"st": slivertune, "Trainer": Trainer, "optimizer": optimizer}
    scope |= {"model": model, "rows": rows, "loader": loader, "arguments": arguments}
    exec(compile(block, "block", "exec"), scope)
    if scope["optimizer"] is not optimizer and "for batch" not in block:
        for batch in loader:
            model(**batch).loss.backward()
            scope["optimizer"].step()
            scope["optimizer"].zero_grad()
    trained = dict(scope["model"].named_parameters())
    changed = [name for name in trained if name not in before or not torch.equal(trained[name], before[name])]
    assert changed
    if "trainer" in scope:
        assert scope["trainer"].state.global_step == 6


@cache
def error_texts() -> set[str]:
    """Every text of the package's own, an ellipsis for each value in it."""
    texts = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    return texts


def quoted() -> list[str]:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^## `(.*)`$", page, re.MULTILINE)


@pytest.mark.parametrize("text", quoted())
def test_each_error_that_is_explained_is_one_of_ours(text: str) -> None:
    assert any(text in one for one in error_texts())


def test_a_text_that_is_not_ours_is_not_found() -> None:
    assert len(quoted()) >= 8
    assert not any("a text that stands nowhere … else" in one for one in error_texts())


@cache
def figures() -> dict[str, Any]:
    """What each picture has to show, by the committed results."""
    return json.loads(run_here(CHECKOUT / "benchmarks" / "tables.py", "--figures", cwd=CHECKOUT))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("fixed_batch.png", "README.md"),
        ("evidence.png", "docs/evidence.md"),
        ("ways_8b_4090.png", "docs/which-method.md"),
    ],
)
def test_a_picture_is_that_of_the_committed_results(name: str, page: str) -> None:
    with Image.open(DOCS / "images" / name) as picture:
        assert json.loads(picture.text["Description"]) == figures()[name]  # type: ignore[attr-defined]
    assert f"images/{name})" in (CHECKOUT / page).read_text(encoding="utf-8")


def notebook() -> list[str]:
    cells = json.loads((CHECKOUT / "examples" / "first_steps.ipynb").read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_runs_and_each_cell_may_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    first, *others = notebook()
    fewer = first.replace("NUM_UPDATES, ROW, BATCH = 40,", "NUM_UPDATES, ROW, BATCH = 11,")  # with a reselection
    assert fewer != first
    for number, source in enumerate((fewer, *others)):
        for _ in range(2):
            exec(compile(source, f"cell {number}", "exec"), scope)
    losses = scope["losses"]
    assert set(losses) == {"dense", "HiFT", "SFT", "TokenTune"}
    assert all(last < first for first, last in losses.values())
