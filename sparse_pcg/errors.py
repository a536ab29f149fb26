"""The errors of this package. Each names what was expected, what was given, and where in the model it happened."""

from __future__ import annotations

from torch._dynamo.exc import ShortenTraceback


class SparsePCGError(RuntimeError):
    """Base of the errors raised by the backend and the runners."""


class OptionError(ShortenTraceback, ValueError):
    """An unknown option or a bad value. A ValueError that passes through Dynamo as it is."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class FrozenError(ShortenTraceback, SparsePCGError):
    """With ``strict=True``: something after ``freeze()`` would have left the captured graphs."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class CaptureError(SparsePCGError):
    """A piece cannot be captured: a host sync inside it, an unstable alias, or the graph device refused."""


class RankError(ShortenTraceback, SparsePCGError):
    """The ranks that run a graph together differ, one of them does not answer, or it is lost."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


def first_line(error: BaseException) -> str:
    """The first line of its message; what follows in an error of CUDA or of a store is no help to a reader."""
    return str(error).partition("\n")[0]


def note(error: BaseException, text: str) -> None:
    """Attach where ``error`` happened (piece, op, source line, bucket) without changing its type."""
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
