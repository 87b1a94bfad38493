"""The errors kvsim raises, one small family.

Catch :class:`KvsimError` for everything, or one of its children. Errors about
input derive from :class:`ValueError` too, so that callers who do not know
kvsim still catch them.
"""

from __future__ import annotations

__all__ = [
    "CommandError",
    "ConfigError",
    "IntegrityError",
    "InternalWorkDueError",
    "KvsimError",
    "PoisonedError",
    "PolicyError",
    "SnapshotError",
    "StoppedError",
    "TimingError",
    "WorkloadError",
]


class KvsimError(Exception):
    """Base of every error raised by kvsim."""


class ConfigError(KvsimError, ValueError):
    """A configuration value is not allowed.

    Parameters
    ----------
    field : str
        Dotted path of the offending field, for example ``sglang.chunked_prefill_size``.
    message : str
        What is allowed and what was given.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class WorkloadError(KvsimError, ValueError):
    """A trace or a request list is malformed.

    Parameters
    ----------
    message : str
        What is wrong, with the value and what is allowed.
    path : str, optional
        The file it was read from.
    line : int, optional
        Line of the file, counted from 1, blank lines included.
    field : str, optional
        The key of the row.
    """

    def __init__(
        self, message: str, *, path: str | None = None, line: int | None = None, field: str | None = None
    ) -> None:
        where = ":".join(str(part) for part in (path, line) if part is not None)
        what = f"{field}: {message}" if field else message
        super().__init__(f"{where}: {what}" if where else what)
        self.path = path
        self.line = line
        self.field = field


class CommandError(KvsimError, ValueError):
    """A command was refused; the rank is unchanged, byte for byte."""


class InternalWorkDueError(CommandError):
    """A transfer is due: process internal work, then repeat the command."""


class TimingError(KvsimError):
    """A timing model failed or returned something that is not a duration."""


class PolicyError(KvsimError):
    """A scaling policy of the user failed; its own exception is the cause."""


class PoisonedError(KvsimError):
    """An earlier failure left the rank between two states; only reading is allowed."""


class StoppedError(KvsimError):
    """A live engine has stopped, or is about to: what was asked of it will not happen."""


class SnapshotError(KvsimError, ValueError):
    """A snapshot does not belong to this build or this configuration."""


class IntegrityError(KvsimError, AssertionError):
    """`check_integrity` found a broken invariant. Always a bug of kvsim: report it."""
