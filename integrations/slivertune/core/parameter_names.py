"""Names of a model's parameters without what wrappers put into them."""

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""What torch.compile and checkpointing call the module that they wrap."""


def without_wrappers(name: str) -> str:
    """A parameter's name before torch.compile or checkpointing wrapped a module that holds it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
