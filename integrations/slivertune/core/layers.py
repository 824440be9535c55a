"""Find the ordered layers of a model: the embedding, the blocks, the head (HiFT, appendix A.4).

Layers are found from the modules and the forward of a model, never from a part of its module paths:

* The *blocks* are the items of every outermost `nn.ModuleList` with an item that holds attention (a module with
  "attention" in its class name). They are in order of registration: an encoder's come before its decoder's. In a model
  without attention, such as Mamba, they are the items of the lists that repeat one class and hold most weights. HiFT
  trains these; what runs block by block (`find_blocks`) asks for attention.
* The *embedding* is every parameter that a forward reads before it enters the blocks: tokens, positions and types,
  class tokens and patches, projections into the blocks, and their norms.
* The *head* is every other parameter: final norms (an encoder's, too), poolers, projections, heads.

"Before" is observed, because the order of registration does not tell it. OPT registers its final norm before its
blocks, CamemBERT its head before its backbone, BART its embedding's norm after its blocks. A copy of the model runs a
dummy batch until it enters its blocks. The copy is on the meta device, so it takes no memory for weights.
"""

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from slivertune.core.forward_trace import trace_forward
from slivertune.core.parameters import num_elements
from slivertune.core.typed_command import setting_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A set of parameters that HiFT trains as one."""

    kind: Literal["embedding", "block", "head", "custom"]
    """Kind of the layer. "custom" if the user listed the layers."""
    name: str
    """One of "embedding", "head", or a block's module path. For a listed layer, its only entry or "custom.INDEX"."""
    parameter_names: tuple[str, ...]
    """Names and order as in `model.named_parameters()`, where a tied parameter has one name. Never empty."""


def find_layers(model: nn.Module, layers: Sequence[str | Sequence[str]] | None = None) -> tuple[Layer, ...]:
    """Sort every parameter of a model, frozen or not, into exactly one layer.

    A parameter with several names, such as a tied head, belongs to the lowest of its layers. Parameters that only
    optional inputs read (the embedding of an entity, of a layout) are not seen before the blocks, so they belong to the
    head. If no dummy batch reaches the blocks, the order of registration decides, and a warning names the modules
    concerned. The model is only read, on any device (the meta device included). The search takes no memory for weights.

    Args:
        model: A transformers model, a PEFT model, or any module with a list of blocks.
        layers: Layers from the bottom to the top, in place of the search. Each lists the module paths and parameter
            names that it consists of, also in one text, joined by plus signs. Together they name every parameter, none
            in two layers. A `*` stands for one part of a path. Such a layer is repeated for each match: `blocks.*` is
            one layer per block.

    Returns:
        Layers from the bottom to the top: embedding, blocks (an encoder's, then its decoder's), head. A layer without
        parameters is left out.

    Raises:
        ValueError: If the model has no list of blocks, or if `layers` has an unknown name, a layer without parameters,
            a parameter in two layers, or one in none.

    Example:
        >>> [layer.name for layer in slivertune.find_layers(model)]
        ['embedding', 'model.layers.0', 'model.layers.1', 'head']
    """
    if layers is not None:
        if isinstance(layers, str):
            raise ValueError(f"layers is the string {layers!r}. Write a list, [{layers!r}]")
        parts = [each.split("+") if isinstance(each, str) else each for each in layers]
        return _listed_layers(model, _written_out(model, parts))
    block_lists = _find_block_lists(model)
    if not block_lists:
        way_out = setting_name("--layers MODULE_PATH ...", "layers=[module path, ...]")
        raise ValueError(
            f"{no_blocks(model)}, and none repeats one class and holds most weights. Name its layers with {way_out}"
        )
    blocks = _blocks_in(block_lists)
    place_of_block = {id(block): place for place, (_, block) in enumerate(blocks, start=1)}
    head = len(blocks) + 1
    embedded = _parameters_before_blocks(model, block_lists)

    places: dict[int, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        within = [place_of_block[id(owner)] for owner in _owners(model, name) if id(owner) in place_of_block]
        place = min(within, default=0 if id(parameter) in embedded else head)
        places[id(parameter)] = min(place, places.get(id(parameter), head))

    names: list[list[str]] = [[] for _ in range(head + 1)]
    for name, parameter in model.named_parameters():
        names[places[id(parameter)]].append(name)
    found = (
        Layer(kind="embedding", name="embedding", parameter_names=tuple(names[0])),
        *(Layer(kind="block", name=path, parameter_names=tuple(names[at])) for at, (path, _) in enumerate(blocks, 1)),
        Layer(kind="head", name="head", parameter_names=tuple(names[head])),
    )
    return tuple(layer for layer in found if layer.parameter_names)


def find_blocks(
    model: nn.Module, *, are_needed: bool = True, with_attention: bool = True
) -> list[tuple[str, nn.Module]]:
    """Find the blocks of a model, including those without parameters.

    Mixers of other kinds may read the weights of their layers past the layers' forwards, or join tokens unseen.

    Args:
        model: A transformers model, a PEFT model, or any module with a list of blocks.
        are_needed: Whether a model without blocks is refused.
        with_attention: Whether a model without attention counts as one without blocks.

    Returns:
        Path and module of each block, from the bottom to the top.

    Raises:
        ValueError: If the model has no list of blocks, and `are_needed`.
    """
    block_lists = _find_block_lists(model, with_attention=with_attention)
    if not block_lists and are_needed:
        raise ValueError(f"{no_blocks(model)}. Only models with blocks can run block by block")
    return _blocks_in(block_lists)


def modules_in_blocks(model: nn.Module) -> set[int]:
    """Return the ids of all modules in the blocks of a model.

    Args:
        model: As in `find_blocks`.

    Raises:
        ValueError: If the model has no list of blocks with attention.
    """
    return {id(module) for _, block in find_blocks(model) for module in block.modules()}


def _blocks_in(block_lists: dict[str, nn.ModuleList]) -> list[tuple[str, nn.Module]]:
    return [(f"{path}.{name}", block) for path, each in block_lists.items() for name, block in each.named_children()]


def no_blocks(model: nn.Module) -> str:
    """Say that a model has no blocks, at the beginning of an error.

    Args:
        model: The model.
    """
    return (
        f"{type(model).__name__} has no nn.ModuleList of blocks: no item of one holds a module with 'attention' in its "
        "class name"
    )


def _written_out(model: nn.Module, layers: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Repeat each layer that has a `*` for each part of a path that it matches, in order of registration."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    # Modules without parameters are no layers.
    owners = {name.rsplit(".", depth)[0] for name in parameters for depth in range(1, name.count(".") + 1)}
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path in owners] + parameters
    written: list[Sequence[str]] = []
    for entries in layers:
        patterns = [entry for entry in entries if "*" in entry]
        by_part: dict[tuple[str, ...], list[str]] = {}
        for pattern in patterns:
            expression = re.compile(re.escape(pattern).replace(r"\*", r"([^.]+)"))
            found = [(match.groups(), path) for path in paths if (match := expression.fullmatch(path))]
            if not found:
                raise ValueError(
                    f"{setting_name('--layers', 'layers=')} has {pattern!r}, which fits no module and no parameter of "
                    f"{type(model).__name__}. See model.named_modules()"
                )
            for part, path in found:
                by_part.setdefault(part, []).append(path)
        plain = [entry for entry in entries if entry not in patterns]
        written += [[*plain, *named] for named in by_part.values()] if patterns else [entries]
    return written


def _listed_layers(model: nn.Module, layers: Sequence[Sequence[str]]) -> tuple[Layer, ...]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    layer_of: dict[str, int] = {}
    for index, entries in enumerate(layers):
        size_before = len(layer_of)
        for entry in entries:
            for parameter in _named_by(entry, model, index):
                name = name_of[id(parameter)]
                if layer_of.setdefault(name, index) != index:
                    raise ValueError(
                        f"{name!r} is in layers[{layer_of[name]}] and, through {entry!r}, in layers[{index}]. Keep it "
                        "in one of them (a tied parameter is one parameter under all its names)"
                    )
        if len(layer_of) == size_before:
            raise ValueError(f"layers[{index}]={list(entries)!r} is empty: it holds no parameter. Drop it or fill it")
    orphans = [name for name in name_of.values() if name not in layer_of]
    if orphans:
        raise ValueError(
            f"{setting_name('--layers', 'layers=')} leaves out {_quoted(orphans)}. Name each parameter, or its module, "
            "in one layer"
        )
    return tuple(
        Layer(
            kind="custom",
            name=entries[0] if len(entries) == 1 else f"custom.{index}",
            parameter_names=tuple(name for name in name_of.values() if layer_of[name] == index),
        )
        for index, entries in enumerate(layers)
    )


def _named_by(entry: str, model: nn.Module, index: int) -> list[nn.Parameter]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if entry in parameters:
        return [parameters[entry]]
    if entry not in dict(model.named_modules(remove_duplicate=False)):
        raise ValueError(
            f"layers[{index}] names {entry!r}, which is neither a module path nor a parameter name of "
            f"{type(model).__name__}. See model.named_modules() and model.named_parameters()"
        )
    return [parameter for name, parameter in parameters.items() if name.startswith(f"{entry}.")]


def _quoted(names: Sequence[str], limit: int = 10) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(repr(name) for name in names[:limit]) + rest


def _find_block_lists(model: nn.Module, *, with_attention: bool = False) -> dict[str, nn.ModuleList]:
    found = _outermost_lists(model, _holds_attention)
    return found if found or with_attention else _repeated_lists(model)


def _repeated_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Find the outermost lists that repeat one class, if they hold most of the weights."""
    found = _outermost_lists(model, _repeats_one_class)
    # An embedding or a head of tokens may be larger than all blocks together.
    ends = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    if (head := getattr(model, "get_output_embeddings", lambda: None)()) is not None:
        ends.append(head)
    uncounted = {id(each) for module in ends for each in module.parameters()}
    sizes = {id(each): num_elements(each) for each in model.parameters() if id(each) not in uncounted}
    in_lists = {id(each) for blocks in found.values() for each in blocks.parameters()}
    return found if 2 * sum(sizes.get(each, 0) for each in in_lists) > sum(sizes.values()) else {}


def _outermost_lists(model: nn.Module, is_wanted: Callable[[nn.ModuleList], bool]) -> dict[str, nn.ModuleList]:
    found: dict[int, tuple[str, nn.ModuleList]] = {}

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            if not isinstance(child, nn.ModuleList):
                visit(child, f"{path}{name}.")
            elif is_wanted(child):
                found.setdefault(id(child), (path + name, child))
            # Lists inside of another, such as experts, are parts of its items.

    visit(model, "")
    return dict(found.values())


def _holds_attention(modules: nn.ModuleList) -> bool:
    return any("attention" in type(module).__name__.lower() for module in modules.modules())


def _repeats_one_class(modules: nn.ModuleList) -> bool:
    return (
        len(modules) > 1 and len({type(module) for module in modules}) == 1 and any(True for _ in modules.parameters())
    )


def _owners(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules on the way from the model to `path`, without the module or parameter at its end."""
    owners = [model]
    for name in path.split(".")[:-1]:
        owners.append(owners[-1].get_submodule(name))
    return owners


@dataclass(kw_only=True, slots=True)
class _Branch:
    """A parameter, or all of a child, of a module that holds blocks. It stays together outside the blocks."""

    path: str
    parent: nn.Module
    is_parameter: bool
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def _branches(model: nn.Module, block_lists: dict[str, nn.ModuleList]) -> Iterable[_Branch]:
    blocks = {id(block) for each in block_lists.values() for block in each}
    parents = {id(owner) for path in block_lists for owner in _owners(model, path)}
    branches: dict[str, _Branch] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners, names = _owners(model, name), name.split(".")
        if any(id(owner) in blocks for owner in owners):
            continue
        depth = max(depth for depth, owner in enumerate(owners) if id(owner) in parents)
        path = ".".join(names[: depth + 1])
        branch = _Branch(path=path, parent=owners[depth], is_parameter=path == name)
        branches.setdefault(path, branch).parameters[name] = parameter
    return branches.values()


def _parameters_before_blocks(model: nn.Module, block_lists: dict[str, nn.ModuleList]) -> set[int]:
    """Return the ids of parameters outside the blocks, in a branch that is read before its parent's blocks.

    A branch stays whole. A parameter that a dummy batch does not reach (a mask token) therefore goes with its
    neighbours. A parameter directly beside a list of blocks (a class token) counts as read before it.
    """
    moments, failures = trace_forward(model, block_lists)
    path_of = {id(each): path for path, each in block_lists.items()}
    before: set[int] = set()
    guesses: dict[str, list[str]] = {"embedding": [], "head": []}
    for branch in _branches(model, block_lists):
        read = [moments[name] for name in branch.parameters if name in moments]
        paths = [path_of[id(module)] for module in branch.parent.modules() if id(module) in path_of]
        entered = [moments[path] for path in paths if path in moments]
        if branch.is_parameter and any(id(child) in path_of for child in branch.parent.children()):
            is_before = True
        elif read or entered:
            is_before = min(read, default=math.inf) < min(entered, default=math.inf)
        else:
            is_before = _is_registered_before(branch, path_of.keys())
            guesses["embedding" if is_before else "head"].append(branch.path)
        if is_before:
            before.update(id(parameter) for parameter in branch.parameters.values())
    if guesses["embedding"] or guesses["head"]:
        placed = ", ".join(f"{_quoted(paths)} to the {layer}" for layer, paths in guesses.items() if paths)
        warnings.warn(
            f"no dummy batch reached all blocks of {type(model).__name__} ({'; '.join(failures) or 'no error'}), so "
            f"the order of registration assigned {placed}. If that is wrong, name the layers with "
            f"{setting_name('--layers', 'layers=')}",
            stacklevel=3,
        )
    return before


def _is_registered_before(branch: _Branch, lists: Collection[int]) -> bool:
    for name, child in branch.parent.named_children():
        if any(id(module) in lists for module in child.modules()):
            return False
        if name == branch.path.rpartition(".")[2]:
            return True
    return False
