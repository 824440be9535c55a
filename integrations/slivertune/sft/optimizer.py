"""SFT as a torch optimizer: trains a sparse delta of a model's weights (SFT, Algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slivertune.sft.allotment import Contender, share_out
from slivertune.sft.checkpoint import VERSION, check_header, check_weight
from slivertune.sft.config import SFTConfig
from slivertune.sft.delta import SparseDelta
from slivertune.sft.delta_file import save_pretrained
from slivertune.sft.growth import POOL_FACTOR, GrowthEstimator
from slivertune.sft.holder import HOLDER_NAME, DeltaHolder
from slivertune.sft.linear import DeltaLayer, check_layer_form
from slivertune.sft.options import checked_options
from slivertune.sft.schedule import Schedule
from slivertune.sft.selection import largest_of, random_indices
from slivertune.sft.targets import Target, count_weights, find_targets
from slivertune.sft.weight import Proposal, SparseWeight, new_moments


class SFT(torch.optim.Optimizer):
    """Sparse fine-tuning with dropping and growth (arXiv 2401.16405), around a model whose weights stay dense.

    The constructor freezes what is not trained and draws the first positions; `step` updates the deltas of the active
    weights by AdamW (AG) or SM3 (MA), and reselects positions when the schedule says so. Weights that are not active
    keep their pretrained bits throughout.

    In the optimizer form the dense weights hold the sum: a hook takes the active entries out of each dense gradient
    as soon as it is complete and frees it, so one tensor's dense gradient is alive at a time. In the layer form the
    weights stay as they are and the layers add the deltas.

    The deltas are parameters of the model while this is attached, outside its `state_dict`: clipping by
    `clip_grad_norm_(model.parameters())`, loss scaling and `model.zero_grad()` work as ever, and the norm that they
    report is that of the trained weights' gradient.

    Args:
        model: The model, in fp32 or bf16, or with bitsandbytes' 4-bit linear layers.
        config: Settings; the defaults are the paper's.
        lr: Learning rate. The paper's are 1e-4 (AG) and 1e-3 (MA) for 7B.
        total_steps: Updates in the whole run (T), over which the rate of replacement falls to zero.
        betas: AdamW's decay rates, (0.9, 0.999) if None; AG alone.
        eps: Added to the denominator; 1e-8 for AG and 1e-30 for MA if None.
        weight_decay: Decoupled decay of the deltas, that is of the weights to their pretrained values.
        momentum: SM3's momentum, in [0, 1); MA alone.

    Raises:
        ValueError: If an argument is out of range or belongs to the other way of selection, no target is found, a
            target can't be trained, or the model has SFT attached.

    Example:
        >>> optimizer = SFT(model, config=SFTConfig(density=0.01), lr=1e-4, total_steps=1000)
        >>> model(**batch).loss.backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        config: SFTConfig | None = None,
        lr: float,
        total_steps: int,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
    ) -> None:
        self._config = config = config or SFTConfig()
        options = checked_options(config, lr, betas, eps, weight_decay, momentum)
        self._schedule = Schedule.of(config, total_steps)
        if any(isinstance(module, DeltaHolder) for module in model.modules()):
            raise ValueError(f"{type(model).__name__} has SFT attached already; call detach() of that optimizer first")
        targets = find_targets(model, config)
        counts = count_weights(targets, config)
        self._model = model
        self._shares = dict(zip((target.name for target in targets), counts, strict=True))
        self._weights = [
            self._new_weight(target, count, options) for target, count in zip(targets, counts, strict=True)
        ]
        self._holder = DeltaHolder(((each.name, each.phi) for each in self._weights), targets[0].parameter.device)
        self._sealed = False
        parameters = [*(weight.phi for weight in self._weights), self._holder.witness]
        super().__init__([{"params": parameters, **options}], options)
        self._sealed = True
        self._updates = 0
        self._grad_norm: torch.Tensor | None = None
        self._handles: list[RemovableHandle] = []
        self._layers: list[DeltaLayer] = []
        self._was_trainable = {name: p.requires_grad for name, p in model.named_parameters()}
        self._attach()
        self._open_phases()

    def _new_weight(self, target: Target, count: int, options: Mapping[str, Any]) -> SparseWeight:
        indices = random_indices(target.name, target.num_elements, count, self._config.seed)
        moments = new_moments(target, count, self._config, options)
        in_layer = self._config.form == "layer" or (self._config.form == "auto" and target.is_4bit)
        if in_layer:
            check_layer_form(target, self._config.phi_gradient)
        elif target.is_4bit:
            raise ValueError(
                f'{target.name} is a 4-bit weight, which form="optimizer" can\'t write; use "auto" or "layer"'
            )
        config = self._config
        return SparseWeight(target, indices, moments, merged=not in_layer, packed=config.packed, seed=config.seed)

    def _attach(self) -> None:
        self._model.requires_grad_(False)
        for weight in self._weights:
            if weight.merged:
                self._take_gradients_of(weight)
            else:
                self._layers.append(DeltaLayer(weight, self._holder.begin, self._config.phi_gradient))
        # On a layer, as a model that is a container would count it among its layers and call it.
        self._weights[0].target.module.add_module(HOLDER_NAME, self._holder)

    def _take_gradients_of(self, weight: SparseWeight) -> None:
        def take(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                weight.take(parameter.grad, self._holder.begin())
                parameter.grad = None

        weight.target.parameter.requires_grad_(True)
        self._handles.append(weight.target.parameter.register_post_accumulate_grad_hook(take))

    @property
    def config(self) -> SFTConfig:
        """The settings."""
        return self._config

    @property
    def updates(self) -> int:
        """Updates applied so far (t); steps without a gradient do not count."""
        return self._updates

    @property
    def num_weights(self) -> int:
        """Weights that are trained (d_phi)."""
        return sum(weight.num_active for weight in self._weights)

    @property
    def is_estimating(self) -> bool:
        """Whether the next update belongs to an estimation phase."""
        return bool(self._schedule.open_phases(self._updates))

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of the trained weights' gradient in the last step, before `max_grad_norm` applied; fp32."""
        return self._grad_norm

    @property
    def num_elements(self) -> dict[str, int]:
        """Elements of each tensor that has trained weights, by parameter name."""
        return {weight.name: weight.target.num_elements for weight in self._weights}

    def claim_state(self) -> None:
        """Tell ledgers once more what is state: one that was made since has taken the deltas for the model's."""
        for weight in self._weights:
            weight.claim()

    def deltas(self) -> dict[str, SparseDelta]:
        """A copy of every tensor's positions and deltas, by parameter name."""
        return {weight.name: weight.delta() for weight in self._weights}

    def base_values(self) -> dict[str, torch.Tensor]:
        """Pretrained values at the positions of `deltas`, by parameter name; 4-bit weights are left out."""
        found = {weight.name: weight.base_values() for weight in self._weights}
        return {name: values.clone() for name, values in found.items() if values is not None}

    def save_pretrained(self, folder: str | Path, *, base_model_name: str | None = None) -> None:
        """Write the deltas, the settings and a hash of each base tensor; weights are only read.

        Args:
            folder: Where to write; `slivertune.sft.load` and `slivertune.sft.apply` read it.
            base_model_name: Folder or hub id of the base model, which `slivertune merge` then finds by itself.

        Raises:
            ValueError: If a delta is not finite.
        """
        config = asdict(self._config)
        if self._config.targets is not None:
            config["targets"] = [each if isinstance(each, str) else each.__name__ for each in self._config.targets]
        save_pretrained(
            folder,
            self.deltas(),
            config=config,
            base=dict(self._model.named_parameters(remove_duplicate=False)),
            base_values=self.base_values(),
            base_model_name=base_model_name,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the targets of a run are fixed.

        Raises:
            RuntimeError: Always, once built.
        """
        if self._sealed:
            raise RuntimeError("SFT's targets are fixed for the whole run; name all of them in SFTConfig(targets=...)")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients gathered since the last step; `set_to_none=False` drops them as well."""
        super().zero_grad(set_to_none=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the deltas, drop their gradients, and reselect if it is time.

        A step in which no active weight has a gradient is none: nothing changes.

        Args:
            closure: Evaluates the model again and returns the loss; called once, before the update.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if all(weight.phi.grad is None for weight in self._weights):
            return loss
        self._clip()
        self._end_estimates()
        for weight in self._weights:
            weight.follow(weight.target.parameter.device)
            weight.update(self.param_groups[0], self._updates)
        self._updates += 1
        self.zero_grad()
        if self._updates == self._schedule.next_reselection(self._updates - 1):
            self._reselect()
        self._open_phases()
        return loss

    def detach(self, *, merge: bool = True) -> None:
        """Take everything off the model that SFT put there, and let `requires_grad` be as before.

        A second call does nothing.

        Args:
            merge: Whether the weights keep the deltas, or get them in the layer form. Otherwise they have their
                pretrained bits.

        Raises:
            ValueError: If 4-bit weights were to be merged.
        """
        owner = self._weights[0].target.module
        if not hasattr(owner, HOLDER_NAME):
            return
        quantised = [weight.name for weight in self._weights if weight.target.is_4bit]
        if merge and quantised:
            raise ValueError(
                f"{quantised[0]} is a 4-bit weight: most deltas would vanish and inactive weights change if it were "
                "quantised again; save deltas() and detach(merge=False), then merge them into the 16-bit model"
            )
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            layer.remove()
        self._handles, self._layers = [], []
        for weight in self._weights:
            weight.merge() if merge else weight.write_base()
        delattr(owner, HOLDER_NAME)
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(self._was_trainable.get(name, parameter.requires_grad))

    def state_dict(self) -> dict[str, Any]:
        """Everything that continues the run at this step: plain containers, and tensors by parameter name.

        An open estimation phase is part of it. Tensors are the living ones where that is possible, as in torch; save or
        copy them before the next step.
        """
        group = {key: value for key, value in self.param_groups[0].items() if key != "params"}
        return {
            "state": {weight.name: weight.state_dict() for weight in self._weights},
            "param_groups": [{**group, "params": [weight.name for weight in self._weights]}],
            "sft": {"version": VERSION, "selection": self._config.selection, "updates": self._updates},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, in either form; tensors are copied.

        The model may hold its pretrained weights or those of the checkpoint; it gets the checkpoint's bits.

        Raises:
            ValueError: If the state is of another model, pretrained value or selection, or damaged; nothing changes.
        """
        names = [weight.name for weight in self._weights]
        check_header(state_dict, self._config.selection, names, len(self.param_groups))
        for weight in self._weights:
            check_weight(weight, state_dict["state"][weight.name])
        saved = state_dict["param_groups"][0]
        self.param_groups[0].update({key: value for key, value in saved.items() if key != "params"})
        self._updates = state_dict["sft"]["updates"]
        self.zero_grad()
        with torch.no_grad():
            for weight in self._weights:
                weight.load_state_dict(state_dict["state"][weight.name])
        self._open_phases()
        for weight in self._weights:
            weight.load_estimates(state_dict["state"][weight.name])

    def _clip(self) -> None:
        gradients = [weight.phi.grad for weight in self._weights if weight.phi.grad is not None]
        self._grad_norm = torch.nn.utils.get_total_norm(gradients)
        if self._config.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(
                [*(weight.phi for weight in self._weights), self._holder.witness],
                self._config.max_grad_norm,
                self._grad_norm,
            )

    def _open_phases(self) -> None:
        """Give estimators to the tensors that will grow at the end of a phase that the next update belongs to."""
        upcoming = self._schedule.next_reselection(self._updates)
        for end in self._schedule.open_phases(self._updates):
            for weight in self._weights:
                num_active, num_elements = weight.num_active, weight.target.num_elements
                grows = num_active < num_elements and self._schedule.num_replaced(end, num_active) > 0
                if not grows or end in weight.estimators:
                    continue
                num_spare = 0 if end == upcoming else self._schedule.most_replaced_later(num_active)
                weight.estimators[end] = GrowthEstimator(
                    num_elements, num_active, num_spare=num_spare, packed=self._config.packed
                )

    def _end_estimates(self) -> None:
        scale = self._holder.scale()
        for end in self._schedule.open_phases(self._updates):
            found = {each.name: each.estimators[end] for each in self._weights if end in each.estimators}
            if self._config.redistribute:
                self._share_candidates(found)
            for estimator in found.values():
                estimator.end_step(self._holder.serial, scale)

    def _share_candidates(self, estimators: Mapping[str, GrowthEstimator]) -> None:
        """After a phase's first update: as many candidates as ever, but from the tensors with the largest gradients."""
        pools = {name: each.pool_magnitudes() for name, each in estimators.items()}
        filled = {name: pool for name, pool in pools.items() if pool is not None}
        if not filled:
            return
        contenders = [Contender(scores=pool, num_kept=0, share=self._shares[name]) for name, pool in filled.items()]
        total = sum(estimators[name].num_candidates for name in filled)
        for name, count in zip(filled, share_out(contenders, total), strict=True):
            estimators[name].num_candidates = count

    def _reselect(self) -> None:
        proposals: list[tuple[SparseWeight, Proposal]] = []
        for weight in self._weights:
            num_replaced = self._schedule.num_replaced(self._updates, weight.num_active)
            breadth = POOL_FACTOR if self._config.redistribute else 1
            proposal = weight.propose(self._updates, num_replaced, breadth) if num_replaced else None
            weight.estimators.pop(self._updates, None)
            if proposal is not None:
                proposals.append((weight, proposal))
        for (weight, proposal), count in zip(proposals, self._num_grown(proposals), strict=True):
            grown = largest_of(proposal.scores, count)
            weight.replace(proposal.dropped, grown, proposal, self.param_groups[0])

    def _num_grown(self, proposals: list[tuple[SparseWeight, Proposal]]) -> list[int]:
        dropped = [int(proposal.dropped.sum()) for _, proposal in proposals]
        if not self._config.redistribute or not proposals:
            return dropped
        contenders = [
            Contender(
                scores=proposal.scores,
                num_kept=weight.num_active - int(proposal.dropped.sum()),
                share=self._shares[weight.name],
            )
            for weight, proposal in proposals
        ]
        return share_out(contenders, sum(dropped))
