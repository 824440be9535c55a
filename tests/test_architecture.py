from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeGuard

import pytest

# A module or folder right under the package, and its floor; a file imports from floors below its own, and from its own
# module or folder.
FLOORS = {
    "core": 0,
    "parked": 1,
    "chunked_loss": 1,
    "deltas": 1,
    "hift": 2,
    "sft": 2,
    "tokentune": 2,
    "parallel": 3,
    "planning": 4,
    "interop": 5,
    "training": 6,
    "cli": 7,
    "__main__": 8,
    "axolotl_plan": 8,
}


def nodes_that_run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not is_for_types and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from nodes_that_run_on_import(child)


def imported_modules(source: str, package: str, *, at_once: bool = False) -> Iterator[str]:
    """Full names of what a file of `package` imports anywhere in it, as far as the import statement tells."""
    tree = ast.parse(source)
    for node in nodes_that_run_on_import(tree) if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def violations(root: Path) -> list[str]:
    """Say which files under the package folder `root` import from where they may not."""
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        own = parts[0]
        if parts == ("__init__",):
            continue  # the public names: resolved on first use, by no file of the package
        if own not in FLOORS:
            found.append(f"{path.name}: {own} has no floor in FLOORS")
            continue
        for name in imported_modules(path.read_text(encoding="utf-8"), ".".join([root.name, *parts[:-1]])):
            top, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if top != root.name or target in (own, "__version__"):
                continue
            if target not in FLOORS:
                found.append(f"{'/'.join(parts)}.py imports {name}: name the module that defines it")
            elif FLOORS[target] >= FLOORS[own]:
                found.append(f"{'/'.join(parts)}.py (floor {FLOORS[own]}) imports {name} (floor {FLOORS[target]})")
    return found


def test_the_picture_of_the_floors_is_the_list_here(checkout: Path) -> None:
    assert {
        module: int(floor)
        for floor, modules in re.findall(
            r"^(\d)  (.+?)(?:  .*)?$", (checkout / "docs" / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE
        )
        for module in modules.split(" │ ")
    } == FLOORS


def test_every_file_that_the_page_on_architecture_names_is_there(checkout: Path) -> None:
    named = {
        name
        for name in re.findall(
            r"`([\w/.]+(?:\.py|/))`", (checkout / "docs" / "architecture.md").read_text(encoding="utf-8")
        )
        if "METHOD" not in name
    }
    assert len(named) > 20
    package = checkout / "integrations" / "slivertune"
    places = [checkout, package, package / "parallel", package / "hift", package / "tokentune"]
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_every_file_imports_only_from_floors_below_its_own(checkout: Path) -> None:
    root = checkout / "integrations" / "slivertune"
    assert len(list(root.rglob("*.py"))) > 1 and violations(root) == []


def circle(root: Path, places: Mapping[str, str]) -> list[str]:
    """Return places that import each other in a circle, or nothing; imports in functions and for types aside.

    Args:
        root: Folder of the package.
        places: Places by the full names of modules.
    """
    imports: dict[str, set[str]] = {}
    for name, place in places.items():
        source = root.parent.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        for each in imported_modules(source, name.rpartition(".")[0], at_once=True):
            target = places.get(each) or places.get(each.rpartition(".")[0])
            if target not in (None, place):
                imports.setdefault(place, set()).add(str(target))
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def modules_of(root: Path) -> list[str]:
    names = (path.relative_to(root.parent).with_suffix("").parts for path in sorted(root.rglob("*.py")))
    return [".".join(parts) for parts in names if parts[-1] != "__init__"]


def test_no_files_import_each_other_and_no_folders_of_training(checkout: Path) -> None:
    root = checkout / "integrations" / "slivertune"
    names = modules_of(root)
    assert len(names) > 200 and circle(root, {name: name for name in names}) == []
    in_training = [name.split(".") for name in names if name.startswith("slivertune.training.")]
    assert circle(root, {".".join(parts): parts[2] for parts in in_training}) == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    root = tmp_path / "slivertune"
    root.mkdir()
    sources = {"a": "from slivertune.b import x", "b": "from slivertune import c", "c": "def f(): import slivertune.a"}
    for name, source in sources.items():
        (root / f"{name}.py").write_text(source, encoding="utf-8")
    places = {name: name for name in modules_of(root)}
    assert circle(root, places) == []
    (root / "c.py").write_text("import slivertune.a", encoding="utf-8")
    assert len(circle(root, places)) == 4


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("core/layers.py", "from slivertune.hift.optimizer import HiFT", 1),
        ("deltas/merge.py", "import slivertune.chunked_loss.handle", 1),
        ("hift/optimizer.py", "def f():\n    from slivertune.sft import SFT", 1),
        ("hift/optimizer.py", "from ..tokentune import hook", 1),
        ("hift/optimizer.py", "from slivertune import cli", 1),
        ("hift/optimizer.py", "from slivertune import HiFT", 1),
        ("hift/optimizer.py", "if TYPE_CHECKING:\n    import slivertune.training.command_line.parse", 1),
        ("interop/trainer.py", "from slivertune.training import arguments", 1),
        ("loose.py", "", 1),
        ("__init__.py", "from slivertune.hift import HiFT", 0),
        ("hift/optimizer.py", "from slivertune.hift.config import HiFTConfig\nfrom . import groups", 0),
        ("hift/optimizer.py", "import torch\nfrom slivertune.core.layers import find_layers\nfrom .. import core", 0),
        ("training/run.py", "from slivertune import __version__\nfrom slivertune.interop.trainer import attach", 0),
        ("__main__.py", "from slivertune.cli import main", 0),
    ],
)
def test_an_import_from_the_same_floor_or_above_is_found_and_no_other(
    file: str, source: str, found: int, tmp_path: Path
) -> None:
    root = tmp_path / "slivertune"
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(source, encoding="utf-8")
    assert len(violations(root)) == found


def test_every_folder_of_tests_is_a_package(checkout: Path) -> None:
    # Two files of one name in folders that are no packages shadow each other.
    assert [
        folder
        for folder in {path.parent for path in (checkout / "tests").rglob("test_*.py")}
        if not (folder / "__init__.py").is_file()
    ] == []


def missing_names(file: Path) -> list[str]:
    """What a file imports from the package that is not there; type checking lets an import in a function pass."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "slivertune":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if not hasattr(module, alias.name) and importlib.util.find_spec(name) is None:
                    found.append(f"{file.name}:{node.lineno} imports {name}")
    return found


def test_every_name_that_is_imported_is_there(checkout: Path) -> None:
    files = [
        file
        for folder in [checkout / name for name in ("integrations", "tests", "benchmarks", "examples")]
        for file in folder.rglob("*.py")
    ]
    assert len(files) > 100 and [each for file in files for each in missing_names(file)] == []


def test_a_name_that_is_not_there_is_found(tmp_path: Path) -> None:
    file = tmp_path / "lost.py"
    file.write_text("def f():\n    from slivertune.parallel import prepare, zero, sparse_zero\n", encoding="utf-8")
    assert missing_names(file) == ["lost.py:2 imports slivertune.parallel.sparse_zero"]


FACTORIES = frozenset({"empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "tensor", "zeros"})
OF_INTEGERS = frozenset({"arange", "randint", "randperm", "sparse_csr_tensor"})
TRAINING = ("chunked_loss", "core", "deltas", "hift", "interop", "parallel", "sft", "tokentune")
ON_ANY_DEVICE = ("adapter_outputs.py", "forward_trace.py")
"""Their batches go where the caller's `with torch.device(...)` says."""


def left_to_defaults(source: str) -> list[str]:
    """Calls of `torch.zeros` and the like that name no dtype or no device; `torch.tensor` knows that of integers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not re.fullmatch(r"torch\.\w+", ast.unparse(node.func)):
            continue
        name, text = ast.unparse(node.func).removeprefix("torch."), ast.unparse(node)
        named = {each.arg for each in node.keywords}
        has_float = name in FACTORIES and (name != "tensor" or re.search(r"\bfloat\(|\d\.\d", text))
        if has_float and "dtype" not in named:
            found.append(f"line {node.lineno}: dtype of {text}")
        if name in FACTORIES | OF_INTEGERS and "device" not in named:
            found.append(f"line {node.lineno}: device of {text}")
    return found


def test_what_trains_leaves_no_dtype_and_no_device_to_torchs_defaults(checkout: Path) -> None:
    # Recipes set torch's default dtype to bf16 to build a model, and some leave it so; notebooks set its device.
    files = [file for name in TRAINING for file in sorted((checkout / "integrations/slivertune" / name).rglob("*.py"))]
    assert len(files) > 100
    found = [
        f"{file.name}, {each}"
        for file in files
        for each in left_to_defaults(file.read_text(encoding="utf-8"))
        if "device of" not in each or file.name not in ON_ANY_DEVICE
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.zeros(3, device=device)", ["dtype"]),
        ("torch.zeros(3, dtype=torch.float32)", ["device"]),
        ("torch.zeros(3, dtype=torch.float32, device=device)", []),
        ("torch.tensor([float(each) for each in found], device=device)", ["dtype"]),
        ("torch.tensor(0.5)", ["dtype", "device"]),
        ("torch.tensor([1, 2], device=device)", []),
        ("torch.randperm(3, generator=generator)", ["device"]),
        ("tensor.new_zeros(3)", []),
        ("torch.zeros_like(tensor)", []),
    ],
)
def test_what_is_left_to_the_defaults_is_found_and_no_more(source: str, expected: list[str]) -> None:
    assert [each.split()[2] for each in left_to_defaults(source)] == expected


HANDLES_A_COMMAND = re.compile(r"sys\.(?:orig_)?argv|\.command\b|shlex\.join|\btyped_command\(|\.agree_on\(")
"""Words of a command are read, joined or shown."""
MASKED_ELSEWHERE = {
    "axolotl_plan.py": "terminal_text.print_line masks the command",
    "core/option_parser.py": "its errors are printed by cli.py, which masks them",
    "core/typed_command.py": "returns words, which their callers print",
    "deltas/adapter_folder.py": "a command for an error, which cli.py masks",
    "planning/answer.py": "report.py prints it and command.py writes it, both masked",
    "training/assemble.py": "reads the names of options alone",
    "training/comparison/comparison.py": "its lines go through command.py, which masks them",
    "training/run.py": "TrainArguments.command is masked when it is made, and cli.py masks what it prints",
    "training/run_report/command.py": "a command with the name of a folder alone",
}
"""Files that handle a command and do not import the masking, with the reason."""


def unmasked_files(root: Path) -> list[str]:
    """Name the files under `root` that handle words of a command and import nothing of `core.masking`."""
    found = []
    for path in sorted(root.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        imported = imported_modules(source, root.name)
        if HANDLES_A_COMMAND.search(source) and not any(".core.masking." in f"{name}." for name in imported):
            found.append(path.relative_to(root).as_posix())
    return found


def test_every_file_that_handles_a_command_masks_its_secrets(checkout: Path) -> None:
    # A file that needs no reason any more leaves the list.
    assert unmasked_files(checkout / "integrations" / "slivertune") == sorted(MASKED_ELSEWHERE)


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("import sys\nprint(sys.argv)", True),
        ("import sys\nprint(sys.orig_argv[1:])", True),
        ("def keep(run):\n    write(run.arguments.command)", True),
        ("import shlex\nprint(shlex.join(words))", True),
        ("from slivertune.core.typed_command import typed_command\nprint(*typed_command('train'))", True),
        ("import sys\nfrom slivertune.core.masking import masked\nprint(masked(sys.argv))", False),
        ("print('command')", False),
    ],
)
def test_a_file_that_shows_a_command_as_it_is_is_found(source: str, is_found: bool, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(source, encoding="utf-8")
    assert unmasked_files(tmp_path) == (["new.py"] if is_found else [])


def texts_of(source: str) -> list[str]:
    """Return the texts of a file with `{}` for values, without docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    others = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    others |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    found = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values))
        elif _is_text(node) and id(node) not in others:
            found.append(node.value)
    return found


def _is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


SAYS_NO_TO_BOTH = re.compile(
    r"\bnot go (?:together )?with\b|\bdon't go (?:together|with)\b|\bgo together\b|\bexclude each other\b|"
    r"\bbe combined\b|\bnot available under\b|\bha(?:s|ve) no effect\b|\bboth set\b|\bset the same thing\b|"
    r"\bLeave out one of the two\b|\btakes? effect only\b"
)
"""Words of a refusal of a combination."""
OTHER_REFUSALS = {
    "chunked_loss/function.py": {
        "hidden states in {} don't go with a weight in {}": "dtypes of two tensors",
        "hidden states of shape {} don't go with a weight of shape {}": "shapes of two tensors",
    },
    "hift/unsupported.py": {
        "gradients='host' is not available under {}": "HiFT and a layout",
        'master="{}" is not available under ZeRO': "HiFT and a layout",
        'state="{}" is not available under ZeRO': "HiFT and a layout",
        "waiting='{}' is not available under {}": "HiFT and a layout",
    },
    "interop/checkpoints.py": {
        "the Trainer has not saved its checkpoint in {}, so slivertune's state can't be saved there. Leave out "
        "hyperparameter_search: it gives every trial a folder, and does not go with slivertune.attach": "a call of the "
        "Trainer, which shows by a folder that is missing",
    },
    "interop/losses.py": {
        "TokenTune does not go with TRL's {}": "a trainer's class",
        "TokenTune does not go with the SFTTrainer of trl {}": "a version of a library",
    },
    "interop/methods.py": {
        "load_best_model_at_end does not go with save_only_model if SFT trains": "two of the Trainer's arguments and a "
        "method",
    },
    "interop/trainer.py": {"{} has no effect on {}'s training": "an argument that no method but one reads"},
    "parallel/zero/unsupported.py": {
        "stream_bytes={} has no effect under ZeRO": "a warning about a layout",
        "{}.{}={} does not go together with {}": "keys of DeepSpeed's config, in a list of their own",
    },
    "planning/arguments.py": {
        "--num_train_epochs {} takes effect only with --tokens": "an option that completes another",
        "--{} {} and --max {} both set it": "one option, given twice",
        "--{} {} and --sweep {}=... both set it": "one option, given twice",
        "--{} {} is set by each row of --compare. Leave out one of the two": "one option, given twice",
    },
    "planning/command.py": {"--{} {} takes effect only with a card": "an option that completes another"},
    "planning/methods.py": {"--load_in_4bit does not go with --method {}": "any method by name, for plan and train"},
    "planning/request.py": {
        "optimizer={} does not go with method={}": "any method by name, in one request",
    },
    "sft/config.py": {"{} set the same thing": "one setting, given twice"},
    "training/layerwise_lr.py": {
        "{}. Leave out one of the two": "an option and what else sets the rates",
    },
    "training/methods/hift.py": {
        "--gpu {} takes effect only with --layers_per_group auto": "an option that completes another"
    },
    "training/methods/registry.py": {
        "--load_in_4bit does not go with --method {}": "a method of another package, which says so itself",
        "{} is not available under {}": "parked weights and an engine, before there is a model",
    },
    "training/methods/sft.py": {
        "--reselection_interval 0 keeps the first choice, so nothing is ever replaced. Leave out one of the two": "two "
        "settings of one config",
    },
    "training/options/arguments.py": {
        "prompt_column={} and response_column={} go together": "columns of data",
        "text_column={} and prompt_column={} exclude each other": "columns of data",
        "{}={} has no effect with task={}": "a column and the task that reads it",
    },
    "training/command_line/parse.py": {
        "--bf16 and --fp16 exclude each other": "two of the Trainer's arguments",
        "--{} {} does not go with {}": "an argument of the Trainer and a built-in dataset",
        "--{} {} has no effect on --task {}": "an argument of the Trainer and a task",
    },
    "training/command_line/plan_words.py": {
        "--method {} is set by each row of --compare. Leave out one of the two": "one option, given twice",
        "--optim_args {} takes effect only with --optim": "an option that completes another",
        "{} means --{} {} here, and --{} {} says otherwise. Leave out one of the two": "one option, given twice",
    },
    "training/options/full_method.py": {
        "--load_in_4bit does not go with --method {}": "an option and what a method stands for",
        "--{} {} does not go with --method {}": "an option and a method that sets it",
        "--bf16 false does not go with --method {}": "an option and a method that sets it",
    },
    "training/options/parser.py": {
        "{} {} resets what --{} {} sets. Leave out one of the two": "one option, given twice"
    },
}
"""Refusals of combinations beside `core/refused_pairs.py`, by file and beginning of the message, with the reason why
they stand there."""


def refusals_of_combinations(source: str) -> list[str]:
    """Return the messages of a file that refuse a combination, up to the end of the clause."""
    said = ((text, SAYS_NO_TO_BOTH.search(text)) for text in texts_of(source))
    return [
        text[: each.end()] + re.split(r"[.,:;](?:\s|$)", text[each.end() :])[0]
        for text, each in said
        if each is not None
    ]


def test_combinations_are_refused_by_one_list_or_stand_here_with_a_reason(checkout: Path) -> None:
    package = checkout / "integrations" / "slivertune"
    found = {
        str(path.relative_to(package)): refusals_of_combinations(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
        if path != package / "core" / "refused_pairs.py"
    }
    assert {file: sorted(texts) for file, texts in found.items() if texts} == {
        file: sorted(reasons) for file, reasons in OTHER_REFUSALS.items()
    }


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('raise ValueError(f"{a} does not go with {b}: no")', ["{} does not go with {}"]),
        ('raise ValueError(f"{a} and {b}" " can\'t be combined. Leave out one")', ["{} and {} can't be combined"]),
        ('"""A docstring: a does not go with b."""', []),
        ('raise ValueError(f"{a} must be positive")', []),
    ],
)
def test_a_refusal_of_a_combination_is_found_and_no_other(source: str, found: list[str]) -> None:
    assert refusals_of_combinations(source) == found


COMMAND = re.compile(
    r"(?:^|\$\()slivertune \w+|"  # words, a whole text, or a command in another
    r"\bslivertune (?:train|plan|compare|merge|unmerge|report|path) (?:[-{$]|[A-Z]{2}|\w+\.yaml)"
)
"""A command with the program's name."""
HELP = ("training/comparison/arguments.py", "training/options/help.py", "training/command_line/plan_help.py")
"""Files of help texts, whose examples name the program as it is installed."""
NAMES_THE_PROGRAM = {
    "axolotl_plan.py": (2, "errors that name a page of help"),
    "cli.py": (4, "two help texts, and two heads of lines that say which command speaks"),
    "hift/rotation.py": (1, "an error in a script, which names a command"),
    "interop/auto_layers.py": (1, "an error in a script, which names a command"),
    "parallel/layout.py": (1, "the library, not the program"),
    "planning/answer.py": (2, "words that are kept, of which report.py prints a command; a note on a command"),
    "planning/layers_per_group.py": (1, "an error that names options"),
    "training/methods/sft.py": (1, "words that are kept, of which report.py prints a command"),
    "training/command_line/parse.py": (1, "words that are kept, of which run.py prints a command"),
    "training/command_line/plan_words.py": (2, "errors that name a page of help or compare two commands"),
    "training/command_line/settings_file.py": (1, "a head of a file, which is read elsewhere"),
    "training/planned_request.py": (1, "a note that names an option"),
    "training/run.py": (1, "a module's name, for a launcher"),
}
"""Files that name the program in a text that might be a command: the number of these texts, and the reason."""


def commands_of(source: str) -> list[str]:
    """Return the texts and the lists of words of a file that have a command with the program's name."""
    lists = (node.elts for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Tuple | ast.List))
    joined = (" ".join(each.value if _is_text(each) else "{}" for each in words) for words in lists)
    return [text for text in (*texts_of(source), *joined) if COMMAND.search(text)]


def test_a_printed_command_names_the_program_as_it_was_typed(checkout: Path) -> None:
    package = checkout / "integrations" / "slivertune"
    found = {
        str(path.relative_to(package)): commands_of(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    }
    numbers = {file: len(texts) for file, texts in found.items() if texts and file not in HELP}
    assert numbers == {file: number for file, (number, _) in NAMES_THE_PROGRAM.items()}


@pytest.mark.parametrize(
    ("source", "num_found"),
    [
        ('print(f"run slivertune train --seed {seed}")', 1),
        ('print(f"--config_file $(slivertune path {preset})")', 1),
        ('words = ["slivertune", "merge", folder]', 1),
        ('words = (*("slivertune", "train"), *more)', 1),
        ("words = typed_command('merge', folder)", 0),
        ('"""Runs slivertune train --seed 3."""', 0),
        ('print("a run of slivertune train wrote this")', 0),
    ],
)
def test_a_command_with_the_programs_name_is_found_and_no_other_text(source: str, num_found: int) -> None:
    assert len(commands_of(source)) == num_found
