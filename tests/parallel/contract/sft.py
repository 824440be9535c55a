"""Runs of SFT: what they are of, what a rank has at their end, and the same in one process on all ranks' rows."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from slivertune import SFT, SFTConfig
from slivertune.core.layout import Layout
from tests.helpers.models import Batch, assert_same_tree, differing, token_batches, weights
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.parallel.contract.runs import Case, Run
from tests.parallel.sft.reference import (
    CAP,
    NAMES,
    PrescribedLayers,
    RanksNaive,
    assert_merged,
    assert_norms_are,
    assert_state_is,
    assert_state_is_near,
    rank_gradients,
)
from tests.sft.reference import Gradients, NaiveSFT

OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated_gradient": {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-4},
    "momentum": {"lr": 1e-2, "eps": 1e-30},
}


@dataclass(frozen=True, kw_only=True)
class SFTCase(Case):
    """A run; with `interval` 5 and `gamma` 3 weights are reselected after 3 (AG) or 5, 10, 15, ... updates."""

    cut: ClassVar[int] = 9
    """Inside the phase of updates 8 to 10, after its first update."""
    more: ClassVar[int] = 4
    """A reselection is among them."""

    selection: str = "accumulated_gradient"
    model: str = "prescribed"
    updates: int = 17
    total: int = 40
    interval: int = 5
    gamma: int = 3
    alpha: float = 0.5
    density: float = 0.15
    absent: bool = False
    """Whether rank 1 has no gradient for the second layer, and rank 0 none for the first one now and then."""
    shuffled: bool = False
    """Whether rank 0 comes by its gradients in another order."""

    @property
    def blocks_of_fsdp2(self) -> list[str]:
        return ["PrescribedBlock" if self.model == "prescribed" else "LlamaDecoderLayer"]

    @property
    def max_norm(self) -> float:
        return self.clip or 1e9

    @property
    def options(self) -> dict[str, Any]:
        return OPTIONS[self.selection]

    def build_model(self, seed: int = 0) -> nn.Module:
        if self.model == "prescribed":
            return PrescribedLayers(self.dtype, seed)
        model: Any = super().build_model(seed)
        if self.checkpointing:
            model.enable_input_require_grads()
        return model

    def build_optimizer(self, model: nn.Module, **changes: Any) -> SFT:
        chosen: dict[str, Any] = {
            "density": self.density,
            "selection": self.selection,
            "reselection_interval": self.interval,
            "estimation_steps": self.gamma,
            "replacement_rate": self.alpha,
            **({"targets": NAMES} if self.model == "prescribed" else {}),
            **self.settings,
            **changes,
        }
        return SFT(model, config=SFTConfig(**chosen), total_steps=self.total, **self.options)

    def build(self, **changes: Any) -> tuple[nn.Module, SFT]:
        model = self.build_model()
        return model, self.build_optimizer(model, **changes)

    def batch(self, update: int, micro: int, rank: int) -> Any:
        if self.model == "prescribed":
            found = rank_gradients(update, micro, rank, self.dtype)
            if self.absent:
                if rank == 1 and update % 2 == 0:
                    del found[NAMES[1]]
                if rank == 0 and update in (0, 3, 7):
                    del found[NAMES[0]]
            return dict(reversed(found.items())) if self.shuffled and rank == 0 else found
        return token_batches(1, seed=1000 * update + 10 * micro + rank)[0]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch) if self.model == "prescribed" else model(**batch).loss

    def result(self, run: Run) -> dict[str, Any]:
        return {"state": plain_state(run.sliver), **super().result(run)}

    def merged(self, run: Run) -> dict[str, torch.Tensor]:
        run.sliver.detach()
        whole = run.accelerator.get_state_dict(run.model) or {}
        return {name: getattr(value, "full_tensor", value.clone)().detach() for name, value in whole.items()}

    def assert_equals_one_process(self, results: list[dict[str, Any]], layout: Layout) -> None:
        """Every rank has what the naive reference has of the whole batch; in bf16 the bits of the library alone.

        Where gradients are rounded to bf16, only the same product over the same batches gives the same bits: the
        reference is the library in one process, which takes each rank's batch as a micro-batch.
        """
        assert all(result["updates"] == self.updates for result in results)
        for result in results:
            assert result["norms"] == results[0]["norms"]
            assert_same_tree(result["state"], results[0]["state"])
        if self.model == "llama" and self.dtype == torch.bfloat16:
            _assert_equal_in_bf16(results, self, in_layers=layout in ("fsdp2", "zero3"))
            return
        if self.model == "prescribed":
            naive, norms = assert_prescribed(results, self)
        else:
            naive, norms = assert_near_one_process(results, self)
        assert self.clip is None or min(norms) < max(norms) > self.clip, "nothing was clipped"
        # Some layouts gather whole weights on rank 0 alone.
        assert results[0]["weights"]
        for result in results:
            if result["weights"]:
                assert_merged(result["weights"], result["state"], naive)

    def assert_resumed(self, saved: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
        assert loaded["updates"] == saved["updates"] == self.cut
        assert_same_tree(loaded["state"], saved["state"])

    def assert_continued(self, results: list[dict[str, Any]], before: int) -> None:
        assert all(result["updates"] == self.cut + self.more for result in results)
        assert_prescribed(results, self, (before,) * self.cut + (len(results),) * self.more)


def assert_prescribed(
    results: list[dict[str, Any]], case: SFTCase, ranks: tuple[int, ...] = ()
) -> tuple[NaiveSFT, list[float]]:
    """Every rank of a run whose gradients are prescribed has what the naive reference has.

    Args:
        results: Of each rank; their norms are those of the last updates.
        case: What was run.
        ranks: How many made each update, if it was not as many as these.

    Returns:
        The reference and its norms.
    """
    naive, norms = prescribed_reference(case, ranks or len(results))
    for result in results:
        assert_state_is(result["state"], naive)
        assert_norms_are(result["norms"], norms[-len(result["norms"]) :], naive, case.accumulation)
    return naive, norms


def assert_near_one_process(
    results: list[dict[str, Any]], case: SFTCase, start: Mapping[str, torch.Tensor] | None = None
) -> tuple[NaiveSFT, list[float]]:
    """Every rank of a Llama's run has what the naive reference has but for the order of the gradients' sums.

    Args:
        results: Of each rank.
        case: What was run.
        start: Pretrained weights in place of the case's own.

    Returns:
        The reference and its norms, which are computed once for all layouts.
    """
    compute = llama_reference_and_exact if start is None else llama_reference_and_exact.__wrapped__
    (naive, norms), (exact, exact_norms) = compute(case, len(results), start)
    for result in results:
        assert_state_is_near(result["state"], naive, exact)
        assert_step_close(result["norms"], norms, exact_norms, cap=CAP)
    return naive, norms


def _assert_equal_in_bf16(results: list[dict[str, Any]], case: SFTCase, *, in_layers: bool) -> None:
    model, sft = case.build(**({"form": "layer"} if in_layers else {}))
    for update in range(case.updates):
        for rank in range(len(results)):
            (case.loss(model, case.batch(update, 0, rank)) / len(results)).backward()
        sft.step()
    state = plain_state(sft)
    for result in results:
        assert_same_tree(result["state"], state)
    sft.detach()
    merged = results[0]["weights"]
    assert differing({name: merged[name] for name in weights(model)}, weights(model)) == []


def plain_state(sft: SFT) -> dict[str, dict[str, torch.Tensor]]:
    """A copy of the state's tensors."""
    return {
        name: {key: value.clone() for key, value in each.items() if isinstance(value, torch.Tensor)}
        for name, each in sft.whole_state()["state"].items()
    }


@functools.cache
def prescribed_reference(case: SFTCase, num_ranks: int | tuple[int, ...]) -> tuple[RanksNaive, list[float]]:
    """The naive reference after the whole case, and its norms.

    Args:
        case: What to run.
        num_ranks: Of the whole case, or of each of its first updates.
    """
    ranks_of = (num_ranks,) * case.updates if isinstance(num_ranks, int) else num_ranks
    _, sft = case.build()
    naive = _naive(RanksNaive, case, sft)
    sft.detach()
    norms = []
    for update, count in enumerate(ranks_of):
        micros = [[case.batch(update, micro, rank) for rank in range(count)] for micro in range(case.accumulation)]
        norms.append(
            naive.update_on_ranks([[_scaled(each, 1 / case.accumulation) for each in ranks] for ranks in micros])
        )
    return naive, norms


def llama_reference(
    case: SFTCase, num_ranks: int, start: Mapping[str, torch.Tensor] | None = None
) -> tuple[NaiveSFT, list[float]]:
    """The naive reference over a Llama's dense gradients, of the whole batch in one process.

    Args:
        case: What to run.
        num_ranks: Whose batches make the whole.
        start: Pretrained weights in place of the case's own.
    """
    model, sft = case.build()
    if start is not None:
        sft.detach()
        model.load_state_dict(start)
        sft = case.build_optimizer(model)
    naive = _naive(NaiveSFT, case, sft)
    sft.detach()
    model.requires_grad_(True)
    norms = []
    for update in range(case.updates):
        micros = []
        for name, weight in naive.weights().items():
            model.get_parameter(name).data.copy_(weight)
        for micro in range(case.accumulation):
            batches: list[Batch] = [case.batch(update, micro, rank) for rank in range(num_ranks)]
            whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
            model.zero_grad()
            (model(**whole).loss / case.accumulation).backward()
            micros.append({name: model.get_parameter(name).grad.clone() for name in naive.base})
        norms.append(naive.update(micros))
    return naive, norms


@functools.cache
def llama_reference_and_exact(case: SFTCase, num_ranks: int, start: Mapping[str, torch.Tensor] | None) -> Any:
    """`llama_reference`, and the same with exact sums."""
    return with_exact(lambda: llama_reference(case, num_ranks, start))


def _naive(kind: Any, case: SFTCase, sft: SFT) -> Any:
    return kind(
        {name: sft.model.get_parameter(name).detach().clone() for name in sft.positions()},
        {name: indices.long() for name, indices in sft.positions().items()},
        selection=case.selection,
        interval=case.interval,
        gamma=case.gamma,
        alpha=case.alpha,
        total=case.total,
        max_norm=case.clip,
        **{"betas": (0.9, 0.999), "weight_decay": 0.0, "momentum": 0.0, **case.options},
    )


def _scaled(gradients: Gradients, factor: float) -> Gradients:
    return {name: gradient.float() * factor for name, gradient in gradients.items()}
