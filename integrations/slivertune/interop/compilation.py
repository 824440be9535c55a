"""`torch_compile=True` in a Trainer's arguments, applied per block. Accelerate would compile the whole model."""

from typing import Any

from accelerate.utils import DynamoBackend
from transformers import Trainer

from slivertune.core.compiled_blocks import CompiledBlocks, compile_blocks, has_compiled_blocks
from slivertune.core.refused_pairs import refusal_of
from slivertune.parallel.layout import layout_of


class BlockCompilation:
    """Compiles the blocks of a Trainer's model between `begin` and `end`, as its arguments say.

    Args:
        trainer: The Trainer; its arguments (`torch_compile`, `torch_compile_backend`, `torch_compile_mode`) or its
            Accelerator (`accelerate launch --dynamo_backend`) give the options.
        fullgraph: Whether a block that torch can't trace whole is an error; HiFT or TokenTune would make torch
            recompile it endlessly.
    """

    def __init__(self, trainer: Trainer, *, fullgraph: bool) -> None:
        self._trainer = trainer
        self._fullgraph = fullgraph
        self._backend: Any = None
        self._is_on = False
        self._handle: CompiledBlocks | None = None

    @property
    def is_asked_for(self) -> bool:
        """Whether the Trainer would compile its model."""
        return self._trainer.args.torch_compile or self._plugin.backend != DynamoBackend.NO

    def begin(self) -> None:
        """Compile the model, unless the Trainer first makes another one, and keep accelerate from compiling it.

        Raises:
            ValueError: If the model has no blocks, or the layout does not support compilation.
        """
        if self._is_on or not self.is_asked_for:
            return
        layout = layout_of(self._trainer.accelerator)
        refusal = refusal_of({"torch.compile": "torch_compile", layout: layout})
        if refusal is not None and not self._fullgraph:
            return  # accelerate compiles in its own way
        if refusal is not None:
            raise ValueError(refusal)
        # The whole process shares accelerate's plugin, so `end` restores it.
        self._is_on, self._backend = True, self._plugin.backend
        self._plugin.backend = DynamoBackend.NO
        if self._trainer.model_init is None:
            self.compile(self._trainer.model)

    def compile(self, model: Any) -> None:
        """Compile a model whose training has begun, unless its blocks are already compiled.

        Args:
            model: The Trainer's model.
        """
        if self._is_on and not has_compiled_blocks(model):
            self._handle = compile_blocks(model, fullgraph=self._fullgraph, **self._options())

    def end(self) -> None:
        """Remove the compilation from the blocks, and restore accelerate's."""
        if not self._is_on:
            return
        self._is_on, self._plugin.backend = False, self._backend
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def _plugin(self) -> Any:
        return self._trainer.accelerator.state.dynamo_plugin

    def _options(self) -> dict[str, Any]:
        arguments, plugin = self._trainer.args, self._plugin
        backend = arguments.torch_compile_backend if arguments.torch_compile else self._backend.value.lower()
        mode = arguments.torch_compile_mode if arguments.torch_compile else plugin.mode
        options = {"backend": backend, "dynamic": plugin.dynamic, "options": plugin.options}
        # torch accepts a mode only for inductor, and not together with options.
        return options if mode in (None, "default") else {**options, "mode": mode}
