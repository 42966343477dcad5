"""What the 4 bits did, by layer and operand: pure statistics, taps in a Flax NNX model, logs, a table and a picture.

A model that is not instrumented is untouched code. `Meter` measures a live one in a program of its own; `instrument`,
`collect` and `capture` are the parts it is made of (docs/telemetry.md).
"""

from fp4jax.telemetry.heatmap import draw_heatmap as draw_heatmap
from fp4jax.telemetry.instrument import Forward as Forward
from fp4jax.telemetry.instrument import Probe as Probe
from fp4jax.telemetry.instrument import capture as capture
from fp4jax.telemetry.instrument import instrument as instrument
from fp4jax.telemetry.log import Log as Log
from fp4jax.telemetry.log import read as read
from fp4jax.telemetry.meter import Meter as Meter
from fp4jax.telemetry.operands import FACTOR_EDGES as FACTOR_EDGES
from fp4jax.telemetry.operands import SQRT3_DB as SQRT3_DB
from fp4jax.telemetry.operands import STATISTICS as STATISTICS
from fp4jax.telemetry.operands import factor_histogram as factor_histogram
from fp4jax.telemetry.operands import operand_statistics as operand_statistics
from fp4jax.telemetry.oscillation import Oscillation as Oscillation
from fp4jax.telemetry.oscillation import Trace as Trace
from fp4jax.telemetry.oscillation import follow as follow
from fp4jax.telemetry.oscillation import start_trace as start_trace
from fp4jax.telemetry.probe import PLACES as PLACES
from fp4jax.telemetry.report import Report as Report
from fp4jax.telemetry.report import report as report
from fp4jax.telemetry.snapshot import Record as Record
from fp4jax.telemetry.snapshot import Snapshot as Snapshot
from fp4jax.telemetry.snapshot import collect as collect
from fp4jax.telemetry.switch import On as On
from fp4jax.telemetry.switch import switchable as switchable
