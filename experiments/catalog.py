"""The experiments, in order of worth: that in which `run` takes them."""

from experiments.backward.config import EXPERIMENT as BACKWARD
from experiments.dge.config import EXPERIMENT as DGE
from experiments.experiment import Experiment
from experiments.granularity.config import EXPERIMENT as GRANULARITY
from experiments.headline.config import EXPERIMENT as HEADLINE
from experiments.occ.config import EXPERIMENT as OCC
from experiments.optimizer.config import EXPERIMENT as OPTIMIZER
from experiments.precision.config import EXPERIMENT as PRECISION
from experiments.published_code.config import EXPERIMENT as PUBLISHED_CODE
from experiments.rates.config import EXPERIMENT as RATES
from experiments.scale.config import EXPERIMENT as SCALE

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        RATES, PRECISION, DGE, OCC, GRANULARITY, OPTIMIZER, HEADLINE, PUBLISHED_CODE, BACKWARD, SCALE,
    )
}  # fmt: skip
