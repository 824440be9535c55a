"""Sums of a base's and an adapter's tensors, computed without PEFT, to verify tensors that PEFT has merged.

The sum of a weight `W` and factors `A` and `B` of rank r is `W + s B A`, where s is alpha / r, or alpha / sqrt(r) with
rsLoRA (Kalajdzievski 2023). With DoRA's magnitude `m` (Liu et al. 2024, section 4.1), each row of the sum is divided by
its norm and multiplied by `m`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slivertune.deltas.adapter_load import ADAPTER_PREFIX, base_name

_PART = re.compile(
    r"(?P<path>.+)\.(?P<part>lora_A|lora_B|lora_B\.bias|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|"
    r"token_adapter\.trainable_tokens_delta)(\.weight)?"
)
_TOKENS = "token_adapter.trainable_tokens_delta"
_UNIT = 2.0**-24
"""Largest relative error of one operation in fp32."""
_CHUNK_ENTRIES = 2**18
"""Entries of a matrix that are summed at once, in fp64: 2 MiB, which a processor's cache holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Product:
    """Product that is added to one matrix."""

    left: torch.Tensor
    """Factor B, shape (rows, r)."""
    right: torch.Tensor
    """Factor A, shape (r, columns)."""
    scale: float
    magnitude: torch.Tensor | None = None
    """Norms of the rows of the sum, shape (rows,). None without DoRA."""


class AdapterSums:
    """Sums of a base's tensors and those of an adapter.

    Args:
        model: A model of the base's class, for the types and parameters of its modules.
        config: Configuration of the adapter.
        weights: The adapter's tensors, by their names in its file.
        tied: Names of each tied weight of the base.

    Raises:
        ValueError: If a tensor of the adapter is of an unknown kind, or belongs to no parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        tied: Sequence[Sequence[str]],
    ) -> None:
        self._model, self._config = model, config
        self._tied = {name: names for names in tied for name in names}
        self._names = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        self._whole: dict[str, torch.Tensor] = {}
        self._rows: dict[str, tuple[list[int], torch.Tensor]] = {}
        self._products: dict[str, list[_Product]] = {}
        parts: dict[str, dict[str, torch.Tensor]] = {}
        # PEFT may keep a replaced module beside the trained one.
        for key in sorted(weights, key=lambda each: "original_module" in each):
            if match := _PART.fullmatch(key.removeprefix(ADAPTER_PREFIX)):
                parts.setdefault(match["path"], {})[match["part"]] = weights[key]
            else:
                self._whole.setdefault(self._known(base_name(key), key), weights[key])
        for path, found in parts.items():
            self._add(path, found)

    def is_sum(self, name: str, base: torch.Tensor | None, written: torch.Tensor) -> bool:
        """Return whether a tensor is the sum, computed in fp32 and rounded once to the tensor's dtype.

        The exact sum is computed in fp64. Each entry must lie between the rounded ends of the interval in which an fp32
        sum can lie. Costs one chunk of fp64 entries.

        Args:
            name: Name of the tensor in the model.
            base: The base's tensor; None if its files lack it.
            written: The tensor to verify.
        """
        value = self._value(name, base)
        if value is None or value.shape != written.shape:
            return False
        products = self._products.get(name)
        if products is None:
            return torch.equal(_bits(value.to(written.dtype)), _bits(written))
        pairs = zip(self._matrices(name, value), self._matrices(name, written), products, strict=True)
        return all(_is_product_added(before, after, product) for before, after, product in pairs)

    def _value(self, name: str, base: torch.Tensor | None) -> torch.Tensor | None:
        """Return the tensor to which products are added: the base's, or one that the adapter replaces."""
        value = self._whole.get(name)
        others = [each for each in self._tied.get(name, ()) if each != name]
        for whole in (self._whole[each] for each in others if each in self._whole):
            # Tied embeddings are resized together, and PEFT may be told to keep them tied.
            is_shared = self._config.get("ensure_weight_tying") or base is None or whole.shape != base.shape
            value = whole if value is None and is_shared else value
        value = base if value is None else value
        for each in (name, *others):
            if value is not None and each in self._rows:
                rows, tensor = self._rows[each]
                return value.float().index_copy(0, torch.tensor(rows, device="cpu"), tensor.float())
        return value

    def _add(self, path: str, parts: Mapping[str, torch.Tensor]) -> None:
        """Add the tensors of one adapted module."""
        module_path = base_name(path)
        module = self._model.get_submodule(module_path)
        if _TOKENS in parts:
            self._rows[self._known(f"{module_path}.weight", path)] = (self._token_rows(module_path), parts[_TOKENS])
        left, right = (parts.get(f"lora_{each}", parts.get(f"lora_embedding_{each}")) for each in "BA")
        if left is None or right is None:
            if parts.keys() - {_TOKENS}:
                raise ValueError(f"{path} of the adapter has only one factor. Get the adapter again")
            return
        targets = self._targeted_parameters(module_path, module)
        if targets:
            # Each targeted parameter of a module has a wrapper around those of the parameters before it.
            name = f"{module_path}.{targets[::-1][path.count('.base_layer')]}"
        else:
            is_attention = isinstance(module, nn.MultiheadAttention)
            name = f"{module_path}.{'in_proj_weight' if is_attention else 'weight'}"
        shape = self._names[self._known(name, path)].shape
        is_stack = bool(targets) and len(shape) == 3
        rank = right.shape[0] // shape[0] if is_stack else right.shape[0]
        scale = self._alpha(name if targets else module_path) / (
            math.sqrt(rank) if self._config["use_rslora"] else rank
        )
        if getattr(module, "groups", 1) != 1:
            raise ValueError(
                f"{module_path} is a convolution of groups, whose sum is not known. Use the adapter by PEFT"
            )
        if is_stack:
            # Rows of A are the ranks of one expert after those of another; columns of B are the experts of each rank.
            pairs = [(left[:, each :: shape[0]], right[each * rank :][:rank]) for each in range(shape[0])]
            self._products[name] = [_Product(left=b, right=a, scale=scale) for b, a in pairs]
        else:
            magnitude = parts.get("lora_magnitude_vector")
            magnitude = None if magnitude is None else magnitude.flatten()
            product = _Product(left=left.flatten(1), right=right.flatten(1), scale=scale, magnitude=magnitude)
            self._products[name] = [product]
        if (bias := parts.get("lora_B.bias")) is not None:
            one = torch.ones(1, 1, dtype=torch.float32, device="cpu")
            self._products[self._known(f"{module_path}.bias", path)] = [
                _Product(left=bias.unsqueeze(1), right=one, scale=scale)
            ]

    def _known(self, name: str, key: str) -> str:
        if name not in self._names:
            raise ValueError(
                f"{key} of the adapter belongs to no parameter that is known here. Use the adapter by PEFT"
            )
        return name

    def _targeted_parameters(self, path: str, module: nn.Module) -> list[str]:
        """Return the names of a module's own parameters that `target_parameters` names, in their order."""
        targets = self._config.get("target_parameters") or ()
        own = [name for name, _ in module.named_parameters(recurse=False)]
        return [name for name in own if any(f".{path}.{name}".endswith(f".{each}") for each in targets)]

    def _token_rows(self, path: str) -> list[int]:
        said = self._config["trainable_token_indices"]
        if isinstance(said, dict):
            said = next(rows for name, rows in said.items() if f".{path}".endswith(f".{name}"))
        return list(said)

    def _alpha(self, path: str) -> float:
        patterns = self._config.get("alpha_pattern") or {}
        found = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", path))
        return float(next(found, self._config["lora_alpha"]))

    def _matrices(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """View a tensor as the matrices that products are added to, with outputs as rows."""
        from transformers.pytorch_utils import Conv1D

        module = self._model.get_submodule(name.rpartition(".")[0])
        if tensor.ndim == 1:
            return [tensor.unsqueeze(1)]
        if tensor.ndim == 3 and not isinstance(module, nn.Conv1d):
            return [each.T if getattr(module, "is_transposed", False) else each for each in tensor]
        return [tensor.T if isinstance(module, (nn.Embedding, Conv1D)) else tensor.flatten(1)]


def _is_product_added(base: torch.Tensor, written: torch.Tensor, product: _Product) -> bool:
    """Return whether a matrix is the sum of a base's and a product, rounded once. All have rows of outputs."""
    left, right = product.left.double() * product.scale, product.right.double()
    if (*left.shape[:1], *right.shape[1:]) != base.shape:
        return False
    num_rows = max(1, _CHUNK_ENTRIES // base.shape[1])
    # By Cauchy and Schwarz, the terms of an entry of the product sum up to no more than these lengths multiplied.
    left_lengths, right_lengths = left.norm(dim=1), right.norm(dim=0) * ((len(right) + 7) * _UNIT)
    for begin in range(0, len(base), num_rows):
        rows = slice(begin, begin + num_rows)
        total = torch.addmm(base[rows].double(), left[rows], right)
        # Bound of the rounding errors of r products, their sum, its scale, and the sum with the base.
        slack = total.abs().mul_(4 * _UNIT).addr_(left_lengths[rows], right_lengths)
        if product.magnitude is not None:
            factor = product.magnitude[rows].double().unsqueeze(1) / total.norm(dim=1, keepdim=True)
            total.mul_(factor)
            # Rounding errors of a norm of n entries grow with the root of n.
            slack.mul_(factor.abs()).add_(total.abs(), alpha=(2 * math.sqrt(base.shape[1]) + 8) * _UNIT)
        low, high = (total - slack).to(written.dtype), total.add_(slack).to(written.dtype)
        # Written so that NaN fails: a comparison with NaN is false.
        if not bool(((low <= written[rows]) & (written[rows] <= high)).all()):
            return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
