"""Defects that can be put into the log of a load's processes."""

VARIABLE = "HEADRACE_HISTORY_MUTANT"


def install(name: str) -> None:
    """Put a defect into this process; none for an empty name."""
    if name:
        raise NotImplementedError
