"""What goes wrong with checkpoints, as exceptions that a caller can tell apart."""

from pathlib import Path
from typing import Self


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or cannot be used. The subclasses say which step and why."""


class UnusableStepError(CheckpointError):
    """A committed step cannot be restored.

    Attributes:
        step: the step asked for.
        path: its directory.
        last_good: the newest other step that can be restored, or None.
    """

    def __init__(self, message: str, *, step: int, path: Path, last_good: int | None):
        super().__init__(message)
        self.step, self.path, self.last_good = step, path, last_good

    def advising(self, argument: str) -> Self:
        """The same error, advising the argument, and flag, by which a command takes the step it reads."""
        n = self.last_good
        flag = f"--{argument.replace('_', '-')}"
        message = str(self).replace(f"pass --resume-step {n} / step={n}", f"pass {flag} {n} / {argument}={n}")
        return type(self)(message, step=self.step, path=self.path, last_good=n)


class DamagedCheckpointError(UnusableStepError):
    """The step no longer holds what was written: a file is missing, truncated or altered, or a leaf differs."""


class CheckpointMismatchError(UnusableStepError):
    """The step is sound and does not fit the target: other leaves, shapes or dtypes."""


class StepProblem(Exception):
    """Internal: why one step cannot be used. `Checkpointer` turns it into an error that names the last good step."""


class PeerProblem(Exception):
    """Internal: why the processes of a run cannot finish a save or restore. It becomes a `CheckpointError` on each."""
