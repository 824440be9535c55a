"""Every collective of the package can say who is missing."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import slivertune

PACKAGE = Path(slivertune.__file__).parent
COLLECTIVES = frozenset(
    [
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "irecv",
        "isend",
        "monitored_barrier",
        "new_group",
        "new_subgroups",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "send",
        "full_tensor",
        "redistribute",
        "GatheredParameters",
    ]
)
MODULES = ("dist", "torch.distributed", "distributed", "deepspeed.comm", "deepspeed.zero")
OF_TENSORS = ("full_tensor", "redistribute")


def collectives(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Line and name of every collective, and whether it stands in a `with` that guards it."""
    yield from _visit(tree, is_guarded=False)


def _visit(node: ast.AST, *, is_guarded: bool) -> Iterator[tuple[int, str, bool]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        is_guarded = False  # called elsewhere
    if isinstance(node, ast.With):
        for item in node.items:
            yield from _visit(item, is_guarded=is_guarded)
            entered = ast.unparse(getattr(item.context_expr, "func", item.context_expr))
            is_guarded = is_guarded or entered.split(".")[-1] == "guard"
        for inner in node.body:
            yield from _visit(inner, is_guarded=is_guarded)
        return
    if isinstance(node, ast.Call):
        owner, _, name = ast.unparse(node.func).rpartition(".")
        if name in COLLECTIVES and (owner in MODULES or name in OF_TENSORS or name == "GatheredParameters"):
            yield node.lineno, name, is_guarded
    for child in ast.iter_child_nodes(node):
        yield from _visit(child, is_guarded=is_guarded)


def test_every_collective_of_the_package_stands_in_a_guard() -> None:
    found = [
        (f"{path.relative_to(PACKAGE)}:{line} {name}", is_guarded)
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, name, is_guarded in collectives(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(found) > 10
    assert [place for place, is_guarded in found if not is_guarded] == []


@pytest.mark.parametrize(
    ("source", "is_guarded"),
    [
        ("dist.all_reduce(x)", False),
        ("with guard('averaging'):\n    dist.all_reduce(x)", True),
        ("with self._heartbeat.guard('averaging'), other():\n    y = torch.distributed.barrier()", True),
        ("with guard('averaging'):\n    def later():\n        dist.broadcast(x, src=0)", False),
        ("with other():\n    x.full_tensor()", False),
        ("with guard('gathering'), deepspeed.zero.GatheredParameters([x]):\n    pass", True),
        ("with deepspeed.zero.GatheredParameters([x]), guard('gathering'):\n    pass", False),
    ],
)
def test_the_search_tells_guarded_from_unguarded(source: str, is_guarded: bool) -> None:
    assert [each for _, _, each in collectives(ast.parse(source))] == [is_guarded]


def test_what_is_no_collective_is_not_found() -> None:
    source = "queue.gather(x)\ndist.get_rank()\nasyncio.gather(x)\nfunctools.reduce(f, x)"
    assert list(collectives(ast.parse(source))) == []
