"""The directory of a run: which steps are committed, which of them are sound, how they come and go."""

import logging
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp4jax.train.checkpoint.errors import CheckpointMismatchError, DamagedCheckpointError, StepProblem
from fp4jax.train.checkpoint.leaves import misfit
from fp4jax.train.checkpoint.manifest import Manifest, sync

_log = logging.getLogger(__name__)

_STEP_NAME = re.compile(r"0|[1-9][0-9]*")
_BUILDING, _DISCARDED = ".building-", ".discarded-"


class StepDirectory:
    """Steps are folders named by their number; whatever is being built or deleted has a hidden name.

    Only renames give and take a number, so a process killed at any moment leaves whole steps and hidden leftovers. A
    numbered folder that is not whole was damaged afterwards.
    """

    def __init__(self, root: Path):
        self.root = root

    def path(self, step: int) -> Path:
        """Where `step` is or would be."""
        return self.root / str(step)

    def committed(self) -> list[int]:
        """Every committed step, sound or damaged, ascending."""
        if not self.root.is_dir():
            return []
        return sorted(int(path.name) for path in self.root.iterdir() if _STEP_NAME.fullmatch(path.name))

    def complete(self, step: int) -> Manifest:
        """The manifest of `step`, after checking it and that every file is there with its full size.

        Raises:
            StepProblem: one of that fails.
        """
        manifest = Manifest.read(self.path(step))
        manifest.check_sizes(self.path(step))
        return manifest

    def verified(self, step: int) -> Manifest:
        """As `complete`, after reading every file and checking its SHA-256.

        Raises:
            StepProblem: one of that fails.
        """
        manifest = self.complete(step)
        manifest.check_contents(self.path(step))
        return manifest

    def is_sound(self, check: Callable[[int], Manifest], step: int, wanted: Mapping[str, Any] | None = None) -> bool:
        """Whether `step` passes `check` (`complete` or `verified`) and fits `wanted`, where that is given."""
        try:
            manifest = check(step)
        except StepProblem:
            return False
        return wanted is None or misfit(manifest.leaves, wanted) is None

    @contextmanager
    def building(self, step: int, replaces: Callable[[int], bool]) -> Iterator[Path]:
        """A hidden folder to fill; leaving the block commits it as `step`, an exception removes it.

        Committed steps for which `replaces` is true go in the same moment.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        folder = self._hidden(_BUILDING, step)
        folder.mkdir()
        try:
            yield folder
            replaced = [old for old in self.committed() if replaces(old)]
            if replaced:
                _log.warning("step %d replaces steps %s of a run that was rewound", step, replaced)
            for old in replaced:
                self.discard(old)
            folder.rename(self.path(step))
            sync(self.root)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # nothing is there once it is renamed

    def discard(self, step: int) -> None:
        """Deletes `step`. It loses its number first: a kill on the way must not leave half a step under it."""
        doomed = self._hidden(_DISCARDED, step)
        self.path(step).rename(doomed)
        shutil.rmtree(doomed)

    def remove_leftovers(self) -> None:
        """Deletes what killed processes left half built or half deleted."""
        if self.root.is_dir():
            for path in self.root.iterdir():
                if path.name.startswith((_BUILDING, _DISCARDED)):
                    _log.info("removing %s, left by a process that was killed", path)
                    shutil.rmtree(path)

    def last_good(self, step: int, wanted: Mapping[str, Any] | None = None) -> int | None:
        """The newest other step than `step` that is sound, all of it read, and fits `wanted` where that is given."""
        others = (other for other in reversed(self.committed()) if other != step)
        return next((other for other in others if self.is_sound(self.verified, other, wanted)), None)

    def damage(self, step: int, problem: str, last_good: int | None) -> DamagedCheckpointError:
        """The error for a step that is not what was written."""
        advice = f"there is no other good checkpoint in {self.root}"
        if last_good is not None:
            advice = f"the last good checkpoint is step {last_good}, pass --resume-step {last_good} / step={last_good}"
        message = f"step {step} at {self.path(step)} is damaged: {problem}; {advice}"
        return DamagedCheckpointError(message, step=step, path=self.path(step), last_good=last_good)

    def mismatch(self, step: int, problem: str, last_good: int | None) -> CheckpointMismatchError:
        """The error for a step that does not fit the target."""
        advice = f"no other checkpoint in {self.root} fits"
        if last_good is not None:
            advice = (
                f"the last checkpoint that fits is step {last_good}, pass --resume-step {last_good} / step={last_good}"
            )
        message = f"step {step} at {self.path(step)} does not fit the target: {problem}; {advice}"
        return CheckpointMismatchError(message, step=step, path=self.path(step), last_good=last_good)

    def _hidden(self, prefix: str, step: int) -> Path:
        return self.root / f"{prefix}{step}-{uuid.uuid4().hex[:8]}"
