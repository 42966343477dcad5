"""Recipes that change during training: which rules hold at which step."""

import bisect
import dataclasses
from collections.abc import Mapping

from fp4jax.nn.rules import Rules


@dataclasses.dataclass(frozen=True)
class RulesSchedule:
    """Rules by training step: those of the last boundary that is not behind `step`.

    It holds no state, so a resumed run finds the rules it stopped with:

        schedule = fp4jax.nn.RulesSchedule({0: rules, 9_000: [(".*", None)]})
        model = fp4jax.nn.quantize_model(model, schedule(start))
        for step in range(start, steps):
            if schedule.switches(step):
                fp4jax.nn.quantize_model(model, schedule(step))
            train_step(model, optimizer, batch)  # under nnx.jit: compiles once for each set of rules

    Args:
        phases: first step of each phase, and its rules. One begins at 0.

    Raises:
        ValueError: no phase begins at 0, or one begins before it.

    Example:
        >>> schedule = RulesSchedule({0: [(".*", fp4jax.recipes.fp4())], 90: [(".*", None)]})
        >>> [step for step in range(100) if schedule.switches(step)], schedule(95)
        ([90], [('.*', None)])
    """

    phases: Mapping[int, Rules]

    def __post_init__(self):
        if not self.phases or min(self.phases) != 0:
            raise ValueError(f"phases begin at steps {sorted(self.phases)}; the first must begin at 0")
        object.__setattr__(self, "phases", {step: self.phases[step] for step in sorted(self.phases)})

    def __call__(self, step: int) -> Rules:
        """The rules of `step`."""
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        steps = list(self.phases)
        return self.phases[steps[bisect.bisect_right(steps, step) - 1]]

    def switches(self, step: int) -> bool:
        """Whether `step` is the first of a phase, the one at 0 excepted."""
        return step > 0 and step in self.phases
