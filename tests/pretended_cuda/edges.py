"""What orders the package's copies, found in its source; any of it can be dropped while a case runs.

An edge is an event that a line hands to the copy streams, a wait of the host, a tensor that is kept until a copy has
ended, a wait when an object is dropped or for a collective, or what the host learns of the disk's thread. To drop one,
its function gets the code of the same source without it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import slivertune

PACKAGE = Path(slivertune.__file__).parent
_MADE_HERE = "core/copy_streams.py"
_STREAMS = re.compile(r"streams(_of\(.*\))?$")
_LEARNS = "Disk._end_exchange"
"""Where the host learns from the disk's thread before it uses memory; what else it asks the thread orders no memory."""
_KEPT, _EVENT, _EVENTS, _FUTURE, _NOTHING = (
    f"_edge_{name}" for name in ("is_kept", "event", "events", "future", "nothing")
)
_Place = tuple[tuple[int, ...], int | None]
"""Where a call begins and ends, and the number of its argument that is taken out; None for the call itself."""


@dataclass
class Edge:
    """What is taken out of one function together.

    Attributes:
        file: Of the package.
        function: Its class, if it has one, and name.
        places: Where it stands.
    """

    file: str
    function: str
    places: list[_Place] = field(default_factory=list)


@cache
def edges() -> dict[str, Edge]:
    """All edges of the package by name: file, function, and what comes after what."""
    found: dict[str, Edge] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text())
        for function, node in [] if file == _MADE_HERE else _functions(tree, ""):
            for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
                for what, number in _edges_of(call, learns=function == _LEARNS):
                    name = f"{file} {function}: {what}"
                    assert name not in found or function == _LEARNS, f"two of one name: {name}"
                    found.setdefault(name, Edge(file, function)).places.append((_span(call), number))
    return found


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count how often each edge comes into force inside."""
    with _swapped(edges(), is_dropped=False) as reached:
        yield reached


@contextmanager
def without(name: str) -> Iterator[Counter[str]]:
    """Drop one of `edges()` inside, and count how often it would have come into force."""
    with _swapped({name: edges()[name]}, is_dropped=True) as reached:
        yield reached


@contextmanager
def _swapped(chosen: dict[str, Edge], *, is_dropped: bool) -> Iterator[Counter[str]]:
    reached: Counter[str] = Counter()
    helpers = _helpers(reached, is_dropped=is_dropped)
    before: dict[FunctionType, CodeType] = {}
    vars(builtins).update(helpers)
    try:
        for file in {edge.file for edge in chosen.values()}:
            own = {name: edge for name, edge in chosen.items() if edge.file == file}
            places = {place: name for name, edge in own.items() for place in edge.places}
            tree = _Rewriting(places).visit(ast.parse((PACKAGE / file).read_text()))
            code = compile(ast.fix_missing_locations(tree), str(PACKAGE / file), "exec", dont_inherit=True)
            for function in {edge.function for edge in own.values()}:
                target = _function_object(file, function)
                before[target] = target.__code__
                target.__code__ = _code_of(code, target.__code__)
        yield reached
    finally:
        for target, original in before.items():
            target.__code__ = original
        for name in helpers:
            delattr(builtins, name)


def _helpers(reached: Counter[str], *, is_dropped: bool) -> dict[str, Any]:
    """What rewritten code calls, with an edge's name."""

    def is_kept(edge: str) -> bool:
        reached[edge] += 1
        return not is_dropped

    def event(edge: str, value: Any) -> Any:
        return value if value is None or is_kept(edge) else None

    def events(edge: str, values: Iterable[Any]) -> list[Any]:
        return [event(edge, value) for value in values]

    def future(edge: str, made: Future[Any], name: str) -> Any:
        if is_kept(edge):
            return getattr(made, name)()
        if name == "done":
            return made._state == "FINISHED"
        wait([made])  # of which the detector sees nothing
        if made._exception is not None:  # type: ignore[attr-defined]
            raise made._exception  # type: ignore[attr-defined]
        return made._result  # type: ignore[attr-defined]

    # A finalizer that is left out is told that it does not run at exit.
    return {_KEPT: is_kept, _EVENT: event, _EVENTS: events, _FUTURE: future, _NOTHING: SimpleNamespace()}


def _edges_of(call: ast.Call, *, learns: bool) -> Iterator[tuple[str, int | None]]:
    """What comes after what by a call, and the number of the argument that says so."""
    if not isinstance(call.func, ast.Attribute):
        return
    owner, name, arguments = ast.unparse(call.func.value), call.func.attr, [ast.unparse(each) for each in call.args]
    if _STREAMS.search(owner):
        if name == "on":
            direction = ast.literal_eval(call.args[0])
            yield from ((f"{direction} copies after {arguments[at]}", at) for at in range(1, len(arguments)))
        elif name in ("compute_after", "wait_on_host"):
            yield f"the {'computation' if name == 'compute_after' else 'host'} after {arguments[0]}", 0
        elif name == "synchronize":
            yield f"the host after all copies of {owner}", None
    elif f"{owner}.{name}" == "torch.cuda.synchronize":
        yield "the host after the device", None
    elif f"{owner}.{name}" == "weakref.finalize" and arguments[1].endswith("streams.synchronize"):
        yield "the end of the object after all copies", None
    elif owner.endswith("_leaving") and name == "append":
        yield f"the end of {arguments[0]} after its copy", None
    elif name == "wait" and owner.endswith("work"):
        yield f"the computation after {owner}", None
    elif learns and name in ("result", "done"):
        yield f"the host after {owner}", None


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Functions of a module, and methods of its classes, by their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")


class _Rewriting(ast.NodeTransformer):
    """Lets a module's code ask whether the edges at some places are kept."""

    def __init__(self, places: dict[_Place, str]) -> None:
        self._places = places

    def visit_Call(self, call: ast.Call) -> ast.AST:
        own = {number: edge for (span, number), edge in self._places.items() if span == _span(call)}
        self.generic_visit(call)
        for number, edge in own.items():
            if number is None:
                return self._asked(call, edge)
            argument = call.args[number]
            if isinstance(argument, ast.Starred):
                argument.value = _call(_EVENTS, ast.Constant(edge), argument.value)
            else:
                call.args[number] = _call(_EVENT, ast.Constant(edge), argument)
        return call

    def _asked(self, call: ast.Call, edge: str) -> ast.AST:
        assert isinstance(call.func, ast.Attribute)
        if call.func.attr in ("result", "done"):
            return _call(_FUTURE, ast.Constant(edge), call.func.value, ast.Constant(call.func.attr))
        return ast.IfExp(_call(_KEPT, ast.Constant(edge)), call, ast.Name(_NOTHING, ast.Load()))


def _span(call: ast.Call) -> tuple[int, ...]:
    return call.lineno, call.col_offset, call.end_lineno or 0, call.end_col_offset or 0


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [*arguments], [])


def _function_object(file: str, function: str) -> FunctionType:
    found: Any = importlib.import_module(f"slivertune.{file.removesuffix('.py').replace('/', '.')}")
    for name in function.split("."):
        found = vars(found)[name]
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    unwrapped = inspect.unwrap(found)
    assert isinstance(unwrapped, FunctionType)
    return unwrapped


def _code_of(module: CodeType, original: CodeType) -> CodeType:
    """The code of the same function in another version of its module."""
    pending = [module]
    while pending:
        code = pending.pop()
        if (code.co_qualname, code.co_firstlineno) == (original.co_qualname, original.co_firstlineno):
            return code
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]
    raise AssertionError(f"{original.co_qualname} is not in {module.co_filename} any more")
