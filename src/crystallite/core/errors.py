"""Every error this package raises on bad input is a `CrystalliteError`.

A message says what was expected, what came, which tensor it was and, where there is one, the way out.
"""

__all__ = [
    "CheckpointError",
    "CrystalliteError",
    "CrystalliteWarning",
    "InvalidMap",
    "InvalidMatrix",
    "InvalidOption",
    "WriteError",
]


class CrystalliteError(Exception):
    """Base of all errors raised on purpose."""


class InvalidMatrix(CrystalliteError, ValueError):
    """An array that is not a finite real matrix of the shape the operation needs."""


class InvalidMap(CrystalliteError, ValueError):
    """An index table that is not a permutation, projection or embedding."""


class InvalidOption(CrystalliteError, ValueError):
    """An argument outside the values it may take."""


class WriteError(CrystalliteError):
    """A file or folder that cannot be written: no space, no permission, or something else in its place."""


class CheckpointError(CrystalliteError):
    """A file that cannot be read as weights: truncated, corrupt, hostile or of an unknown format."""


class CrystalliteWarning(UserWarning):
    """Something that works and that a user should know before waiting for it."""
