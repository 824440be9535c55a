"""Who steps where there are several ranks: HiFT by itself, HiFT under a layout, or an engine in its place."""

from __future__ import annotations

import torch.distributed as dist


class Integration:
    """What HiFT was prepared for."""

    def __init__(self) -> None:
        self._name: str | None = None
        self.is_delegated = False
        """Whether an engine steps."""

    def use_layout(self, name: str) -> None:
        """Let HiFT step under a layout."""
        self._name = name

    def delegate_to(self, engine: str) -> None:
        """Let an engine step from now on."""
        self._name, self.is_delegated = engine, True

    def check_step(self) -> None:
        """Refuse a step of which the other ranks would know nothing, or that is not HiFT's.

        Raises:
            RuntimeError: Naming the way out.
        """
        self.check_not_delegated()
        if self._name is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"HiFT runs on {dist.get_world_size()} ranks that know nothing of each other's gradients; prepare it "
                "with slivertune.prepare(accelerator, ...), slivertune.initialize(...) for bare DeepSpeed, or "
                "slivertune.attach(trainer, ...) for the Trainer"
            )

    def check_not_delegated(self) -> None:
        """Refuse what only makes sense while HiFT itself steps.

        Raises:
            RuntimeError: If an engine does.
        """
        if self.is_delegated:
            raise RuntimeError(
                f"{self._name} steps in HiFT's place; step, save and load with what slivertune.prepare or "
                "slivertune.initialize returned"
            )
