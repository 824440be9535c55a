"""What a saved state is refused with."""


class StateMismatchError(ValueError):
    """A saved state is of another model, grouping, selection or optimizer, or is damaged."""
