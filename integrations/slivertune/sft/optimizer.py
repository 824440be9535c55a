"""SFT as a torch optimizer, which trains a sparse delta of a model's weights (SFT, Algorithms 1 and 2).

This file is long because the documented interface is. `SparseWeight` updates one tensor, `Reselection` reselects
weights, `ModelHooks` changes the model, and `export` writes deltas.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slivertune.core.hyperparameters import load_hyperparameters, own_hyperparameters
from slivertune.core.layout import Layout
from slivertune.core.parameters import check_free, release, take
from slivertune.core.saved_state import COUNT_LIMIT, StateMismatchError
from slivertune.core.sliver import IDLE_STEPS, OWN_GRADIENTS, CheckpointedSliver
from slivertune.deltas.delta import SparseDelta
from slivertune.sft.adam import age_limit
from slivertune.sft.checkpoint import VERSION, check_header, check_weight
from slivertune.sft.communicator import Communicator
from slivertune.sft.config import SFTConfig, checked_options
from slivertune.sft.delta_parameters import DeltaParameters
from slivertune.sft.export import copy_base_values, copy_deltas, save
from slivertune.sft.gradient_sync import GradientSync
from slivertune.sft.linear import check_layer_form
from slivertune.sft.model_hooks import ModelHooks
from slivertune.sft.moments import new_moments
from slivertune.sft.reselection import Reselection, Schedule
from slivertune.sft.selection import random_indices
from slivertune.sft.targets import Target, count_weights, find_targets
from slivertune.sft.unsupported import clash_with_layout
from slivertune.sft.weight import PretrainedValues, SparseWeight


class SFT(CheckpointedSliver):
    """Sparse fine-tuning with dropping and growth (arXiv 2401.16405), for a model whose weights stay dense.

    The constructor freezes all other weights and draws the first positions. `step` updates the deltas of the active
    weights by AdamW (AG) or SM3 (MA), and reselects positions by the schedule. Inactive weights keep their pretrained
    bits throughout.

    In the optimizer form the dense weights hold the sum. A hook takes the active entries out of each dense gradient as
    soon as it is complete, then frees it, so one tensor's dense gradient exists at a time. In the layer form the
    weights stay unchanged and the layers add the deltas.

    While SFT is attached, the deltas are parameters of the model, outside its `state_dict`. Clipping by
    `clip_grad_norm_(model.parameters())`, loss scaling and `model.zero_grad()` work as usual, and the norm that they
    report is that of the trained weights' gradient.

    Args:
        model: The model, in fp32 or bf16, or with bitsandbytes' 4-bit linear layers.
        config: Settings; the defaults are the paper's.
        lr: Learning rate. The paper's are 1e-4 (AG) and 1e-3 (MA) for 7B.
        total_steps: Updates in the whole run (T), over which the replacement rate falls to zero.
        betas: AdamW's decay rates, (0.9, 0.999) if None; for AG only.
        eps: Term added to the denominator; 1e-8 for AG and 1e-30 for MA if None.
        weight_decay: Decoupled decay of the deltas, and so of the weights to their pretrained values.
        momentum: SM3's momentum, in [0, 1); for MA only.

    Raises:
        ValueError: If an argument is out of range or belongs to the other criterion, if no target is found or a target
            can't be trained, or if the model has SFT attached or another optimizer of this library holds it.

    Example:
        >>> optimizer = SFT(model, config=SFTConfig(density=0.01), lr=1e-4, total_steps=1000)
        >>> model(**batch).loss.backward()
        >>> optimizer.step()
    """

    reselection_class = Reselection
    """Class that chooses dropped and grown weights. Planning uses one that counts its work."""

    method = "sft"
    without_state = "its deltas can't be told from pretrained weights"
    title = "SFT"
    refusal_to_add = "SFT's targets are fixed for the whole run. Name all of them in SFTConfig(targets=...)"
    refusal_to_copy = (
        "SFT can't be copied or pickled, as it is attached to its model. Save state_dict(), and load it into an "
        "SFT that was built over the other model"
    )

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
        if not isinstance(model, nn.Module):
            raise ValueError(f"SFT got a {type(model).__name__} in place of a model (nn.Module). Pass the model itself")
        self._config = config = config or SFTConfig()
        if not isinstance(config, SFTConfig):
            raise ValueError(f"config={config!r} must be an SFTConfig, such as SFTConfig(density=0.01)")
        options = checked_options(config, lr, betas, eps, weight_decay, momentum)
        self._schedule = Schedule.of(config, total_steps)
        if any(isinstance(module, DeltaParameters) for module in model.modules()):
            raise ValueError(
                f"{type(model).__name__} has SFT attached already. Call detach() of that optimizer first, or load the "
                "model again if that optimizer is gone"
            )
        check_free(model.named_parameters(), "SFT")
        targets = find_targets(model, config)
        counts = self._counts(targets, config)
        self.model = model
        """Model whose weights are trained."""
        self._weights = [
            self._new_weight(target, count, options) for target, count in zip(targets, counts, strict=True)
        ]
        self._reselection = self.reselection_class(self._weights, counts, self._schedule, config)
        self._delta_parameters = DeltaParameters(
            ((each.name, each.phi) for each in self._weights), targets[0].parameter.device
        )
        super().__init__([{"params": list(self._delta_parameters.parameters()), **options}], options)
        self._updates = 0
        self._num_idle_steps = 0
        self._has_warned_of_idle = False
        self.grad_norm: torch.Tensor | None = None
        """Norm of the trained weights' gradient in the last step, before `max_grad_norm` applied (fp32 scalar)."""
        self._gradient_sync = GradientSync(self._weights, self._delta_parameters)
        self._hooks = ModelHooks(
            model,
            self._weights,
            self._delta_parameters,
            self._gradient_sync,
            config.phi_gradient,
            self,
        )
        self._hooks.put_on()
        for parameter in model.parameters():
            parameter.grad = None  # of an earlier backward, which would count as one of the deltas'
        take(model.parameters(), self)
        self._reselection.open_phases(self._updates)

    def _counts(self, targets: tuple[Target, ...], config: SFTConfig) -> list[int]:
        return count_weights(targets, config)

    def _new_weight(self, target: Target, count: int, options: Mapping[str, Any]) -> SparseWeight:
        config = self.config
        indices = random_indices(target.name, target.num_elements, count, config.seed)
        moments = new_moments(target, count, config, options)
        # A tensor that ZeRO-3 has already partitioned can't be written.
        is_elsewhere = hasattr(target.parameter, "ds_id")
        in_layer = is_elsewhere or config.form == "layer" or (config.form == "auto" and target.is_4bit)
        if in_layer:
            check_layer_form(target, config.phi_gradient)
        elif target.is_4bit:
            raise ValueError(
                f'{target.name} is a 4-bit weight, which form="optimizer" can\'t write. Use "auto" or "layer"'
            )
        return SparseWeight(target, indices, moments, merged=not in_layer, packed=config.packed, seed=config.seed)

    @property
    def config(self) -> SFTConfig:
        """Settings of the optimizer."""
        return self._config

    @property
    def updates(self) -> int:
        """Number of updates applied so far (t), without steps that had no gradient."""
        return self._updates

    @property
    def total_steps(self) -> int:
        """Updates in the whole run (T)."""
        return self._schedule.total_steps

    @property
    def targets(self) -> tuple[Target, ...]:
        """Tensors that have trained weights."""
        return tuple(weight.target for weight in self._weights)

    @property
    def num_weights(self) -> int:
        """Number of trained weights (d_phi)."""
        return sum(weight.num_active for weight in self._weights)

    @property
    def is_estimating(self) -> bool:
        """Whether the next update belongs to an estimation phase."""
        return bool(self._schedule.open_phases(self._updates))

    def metrics(self) -> dict[str, float]:
        """Return the numbers of trained weights and reselections, and whether an estimation phase is open."""
        return {
            "trained_parameters": self.num_weights,
            "reselections": self._schedule.num_reselections(self._updates),
            "is_estimating": int(self.is_estimating),
            **super().metrics(),
        }

    @property
    def num_elements(self) -> dict[str, int]:
        """Number of elements of each tensor that has trained weights, by parameter name."""
        return {weight.name: weight.target.num_elements for weight in self._weights}

    def claim_state(self) -> None:
        """Register the state again, since a memory ledger created later counts the deltas as the model's."""
        for weight in self._weights:
            weight.claim()

    def deltas(self) -> dict[str, SparseDelta]:
        """Copy the positions and deltas of every tensor, by parameter name: int32 and fp32, shape (n,).

        Raises:
            RuntimeError: If other code has set trained entries of the weights since the last step, if an update may be
                half done, or after `detach`.
        """
        self._check_on("deltas()")
        return copy_deltas(self._weights)

    def positions(self) -> dict[str, torch.Tensor]:
        """Return the positions of every tensor's trained weights by parameter name: int32, sorted, live or copied."""
        return {weight.name: weight.indices for weight in self._weights}

    def base_values(self) -> dict[str, torch.Tensor]:
        """Copy the pretrained values at the positions of `deltas`, by parameter name, without 4-bit weights.

        Raises:
            RuntimeError: If an update may be half done, or after `detach`.
        """
        self._check_on("base_values()")
        return copy_base_values(self._weights)

    def _check_on(self, call: str) -> None:
        """Check that deltas and pretrained values can still be told apart."""
        self._check_whole()
        if not self._hooks.is_on:
            raise RuntimeError(
                f"{call} came after detach(), when the weights hold the deltas for good, or no longer. Save before "
                "detach()"
            )

    def save_pretrained(self, folder: str | Path, *, base_model_name: str | None = None) -> None:
        """Write the deltas, the settings and a hash of each base tensor, without changing the weights.

        With several ranks, all of them call it with the same folder, and rank 0 writes.

        Args:
            folder: Destination folder, which `slivertune.deltas.load` and `slivertune.deltas.apply` read.
            base_model_name: Folder or hub id of the base model, by which `slivertune merge` then finds it.

        Raises:
            ValueError: If a delta is not finite.
            RuntimeError: As `deltas`.

        Example:
            >>> optimizer.save_pretrained("deltas/law")
            >>> handle = slivertune.deltas.apply(base_model, "deltas/law")
        """
        self._check_on("save_pretrained()")
        writes = self._gradient_sync.communicator.is_first
        save(folder, self.model, self._weights, self.config, writes=writes, base_model_name=base_model_name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients gathered since the last step, also with `set_to_none=False`."""
        super().zero_grad(set_to_none=True)
        self._gradient_sync.has_own = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the deltas, drop their gradients, and reselect weights if it is time.

        If no active weight has a gradient, nothing changes and the step does not count. Entries of the weights that
        other code has set since the last step become pretrained values, from which training continues.

        Args:
            closure: Function that evaluates the model again and returns the loss; called once, before the update.

        Returns:
            Result of the closure, or None.

        Raises:
            RuntimeError: If other ranks train too and the gradients were not averaged over them, if a checkpoint's
                placeholder was loaded without the state that belongs to it, if a trained tensor was replaced or cast,
                if an earlier step failed, so that its update may be half done, or after `detach`.
        """
        if not self._hooks.is_on:
            raise RuntimeError("step() was called after detach(), which ends SFT's training. Build a new SFT to go on")
        self._hooks.check()
        self._hooks.check_shards()
        self._check_param_groups()
        self._gradient_sync.communicator.check()
        self._check_awaited()
        if closure is None and self._has_gradient() and self._is_initialising():
            return None
        self._check_whole()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hooks.note_gradients()
        if not self._has_gradient():
            self._note_idle_step()
            return loss
        self._num_idle_steps = 0
        if self._gradient_sync.has_own:
            raise RuntimeError(OWN_GRADIENTS)
        self._begin_change("step()")
        self._update()
        self._end_change()
        return loss

    def _update(self) -> None:
        """Update the deltas from their gradients, drop these, and reselect weights if it is time."""
        self.grad_norm = self.clip_(self.config.max_grad_norm or math.inf)
        self._reselection.end_estimates(self._updates, self._delta_parameters)
        for weight in self._weights:
            weight.follow(weight.pretrained.device)
            weight.update(self.param_groups[0], self._updates)
        self._updates += 1
        self._gradient_sync.communicator.enter(self._updates)
        self.zero_grad()
        if self._updates == self._schedule.next_reselection(self._updates - 1):
            self._reselection.reselect(self._updates, self.param_groups[0])
            self._gradient_sync.communicator.compare(self._updates, self.positions())
        self._reselection.open_phases(self._updates)

    def _has_gradient(self) -> bool:
        return any(weight.phi.grad is not None for weight in self._weights)

    def _note_idle_step(self) -> None:
        """Warn at the first step whose backward reached no trained tensor, and if there was no gradient for many."""
        self._num_idle_steps += 1
        is_first = self._delta_parameters.is_idle and not self._has_warned_of_idle
        if not is_first and self._num_idle_steps != IDLE_STEPS:
            return
        self._has_warned_of_idle |= is_first
        steps = "this step, which is no" if is_first else f"the last {IDLE_STEPS} steps, none of which was an"
        warnings.warn(
            f"no gradient has reached any of the {len(self._weights)} trained tensors (the first is "
            f"{self._weights[0].name}) in {steps} update. Check that the loss depends on them, call "
            "torch.utils.checkpoint.checkpoint with use_reentrant=False, or name others with SFTConfig(targets=...)",
            stacklevel=4,
        )

    def set_total_steps(self, total_steps: int) -> None:
        """Set the updates of the whole run (T) before the first one, if the run has another length than was expected.

        Args:
            total_steps: As in the constructor. With several ranks, the same on all of them.

        Raises:
            RuntimeError: After the first update.
            ValueError: If it is not positive.
        """
        if self._updates:
            raise RuntimeError(
                f"SFT has made {self._updates} of {self.total_steps} updates, and reselections have followed their "
                "schedule. Set total_steps before the first update, or build a new SFT"
            )
        self._schedule = self._reselection.schedule = Schedule.of(self.config, total_steps)
        for weight in self._weights:
            weight.estimators.clear()
        self._reselection.open_phases(0)

    @property
    def is_merged(self) -> bool:
        """Whether the weights hold the sums, and not the pretrained values beside the deltas (layer form)."""
        return all(weight.merged for weight in self._weights)

    @property
    def is_attached(self) -> bool:
        """Whether it trains the model, until `detach`."""
        return self._hooks.is_on

    def were_trainable(self) -> list[torch.nn.Parameter]:
        """Return the model's parameters that required a gradient before SFT was built."""
        return self._hooks.were_trainable()

    def detach(self, *, merge: bool = True) -> None:
        """Remove everything that SFT put on the model, and restore `requires_grad`.

        A second call does nothing. After a failed step the weights stay as they are, which a warning says.

        Args:
            merge: Whether the weights hold the deltas afterwards, in either form. Otherwise they hold their pretrained
                bits.

        Raises:
            ValueError: If 4-bit weights were to be merged.
            RuntimeError: If deltas were to be merged into shards that other code has written.
        """
        if not self._hooks.is_on:
            return
        quantised = [weight.name for weight in self._weights if weight.target.is_4bit]
        if merge and quantised:
            raise ValueError(
                f"{quantised[0]} is a 4-bit weight: most deltas would vanish and inactive weights change if it were "
                "quantised again. Save deltas(), call detach(merge=False), and merge them into the 16-bit model"
            )
        if self._half_done is not None:
            warnings.warn(f"detach() leaves the weights as they are: {self._half_done}", stacklevel=2)
        elif merge:
            self._hooks.check_shards()
        else:
            for weight in self._weights:
                weight.adopt()
        self._hooks.take_off()
        if self._half_done is None:
            for weight in self._weights:
                weight.merge() if merge else weight.write_base()
        self._hooks.restore_requires_grad()
        release(self.model.parameters(), self)

    @contextmanager
    def rebinding_parameters(
        self,
        communicator: Communicator,
        *,
        in_layers: bool = False,
        pretrained: Callable[[Target], PretrainedValues] = PretrainedValues,
        with_delta_parameters: bool = True,
    ) -> Iterator[None]:
        """Follow the model while a layout rearranges it. Inside, it is a frozen model with its pretrained weights.

        Args:
            communicator: Connection to the other ranks from then on.
            in_layers: Whether the weights can't be written from then on, so that the layers have to add the deltas.
            pretrained: Factory of the reader and writer of a tensor's pretrained values from then on.
            with_delta_parameters: Whether the deltas become parameters of the model again; not if an engine that holds
                the model would take them for its own.

        Raises:
            RuntimeError: If an update may be half done.
        """
        self._check_whole()
        self._hooks.take_off()
        for weight in self._weights:
            weight.adopt()
            weight.write_base()
        yield
        self._gradient_sync.communicator = communicator
        for weight in self._weights:
            weight.place(weight.merged and not in_layers, pretrained(weight.target))
        self._hooks.put_on(with_delta_parameters=with_delta_parameters)

    def check_built_over(self, model: nn.Module) -> None:
        """Check that this optimizer was built over a model.

        Raises:
            ValueError: If it was built over another model.
        """
        if self.model is not model:
            raise ValueError(
                "the SFT was built over another model than the one that was passed. Build it over this model, before "
                "anything wraps that"
            )

    def identity(self) -> dict[str, object]:
        """Return the facts that a saved state shares with every SFT that it fits: criterion, and names of tensors."""
        return {"selection": self.config.selection, "tensors": [weight.name for weight in self._weights]}

    def facts(self) -> dict[str, object]:
        """Return the values that every rank must share: settings, hyperparameters, tensors, and positions in them."""
        facts = {"total_steps": self.total_steps, **super().facts()}
        for weight in self._weights:
            facts[weight.name] = (weight.target.shape, str(weight.target.parameter.dtype), weight.num_active)
        facts["the positions of the trained weights"] = self.positions()
        return facts

    def unsupported(self, layout: Layout) -> str | None:
        """Return the reason why this SFT can't be trained under a layout, with the way out, or None if it can."""
        clashes = (clash_with_layout(layout, each, self.config.phi_gradient) for each in self.targets)
        return next((clash for clash in clashes if clash is not None), None)

    def _parameters_of_state(self) -> list[torch.Tensor]:
        parameters: list[torch.Tensor] = self.param_groups[0]["params"]
        return parameters

    def whole_state(self) -> dict[str, Any]:
        """Return the state that continues the run at this step: plain containers, and tensors by parameter name.

        It includes an open estimation phase, and is the same on every rank. Tensors may be live, as in torch: save or
        copy them before the next step.

        Raises:
            RuntimeError: If an update has failed, so that it may be half done, or after `detach`.
        """
        self._check_on("state_dict()")
        return {
            "state": {weight.name: weight.state_dict() for weight in self._weights},
            "param_groups": [
                {**own_hyperparameters(self.param_groups[0]), "params": [weight.name for weight in self._weights]}
            ],
            "sft": {"version": VERSION, "selection": self.config.selection, "updates": self._updates},
        }

    def load_whole_state(self, state_dict: Mapping[str, Any]) -> None:
        """Load a copy of a state that `whole_state` returned.

        The model may hold its pretrained weights or those of the checkpoint. It gets the checkpoint's bits.

        Raises:
            ValueError: If the state is damaged, or of another model, pretrained value or criterion; nothing changes.
        """
        check_header(state_dict, self.identity(), self.param_groups)
        for group in state_dict["param_groups"]:
            options = {key: group[key] for key in self.defaults.keys() & group.keys()}
            try:
                checked_options(self.config, **{"betas": None, "momentum": 0.0, **options})
            except (TypeError, ValueError) as error:
                raise StateMismatchError(f"the saved state is damaged: {error}. Use another checkpoint") from error
        saved = state_dict["state"]
        self._check_counts(saved)
        betas = state_dict["param_groups"][0].get("betas")
        for weight in self._weights:
            oldest = COUNT_LIMIT if betas is None else age_limit(tuple(betas))
            check_weight(weight, saved[weight.name], oldest, is_whole=self._half_done is None)
        if self._half_done is not None:
            for weight in self._weights:
                weight.forget()
        self._begin_change("load_state_dict()")
        load_hyperparameters(self.param_groups, state_dict["param_groups"])
        self._updates = state_dict["sft"]["updates"]
        self.zero_grad()
        with torch.no_grad():
            for weight in self._weights:
                weight.load_state_dict(saved[weight.name])
        self._reselection.open_phases(self._updates)
        for weight in self._weights:
            weight.load_estimates(saved[weight.name])
        self._end_change()

    def _check_counts(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that as many weights train in a saved state, in all tensors together if they are redistributed."""
        known = {name: len(each.get("indices", ())) for name, each in saved.items()}
        shares = self._reselection.shares
        names = ["all tensors"] if self.config.redistribute else list(shares)
        for name in names:
            own = shares.get(name, sum(shares.values()))
            other = known.get(name, sum(known.values()))
            if own != other:
                raise StateMismatchError(
                    f"the saved state trains {other:,} weights of {name}, and this optimizer {own:,}. Build it with "
                    "the saved run's density, num_weights or equivalent_lora_rank"
                )

    @torch.no_grad()
    def clip_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to a norm of at most `max_norm`, as `clip_grad_norm_(model.parameters())` would.

        Args:
            max_norm: Largest norm; infinity only measures.

        Returns:
            Norm before clipping, an fp32 scalar.
        """
        norm = torch.nn.utils.get_total_norm([w.phi.grad for w in self._weights if w.phi.grad is not None])
        if math.isfinite(max_norm):
            torch.nn.utils.clip_grads_with_norm_(self._delta_parameters.parameters(), max_norm, norm)
        return norm
