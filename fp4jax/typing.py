"""Array types and the axis letters used throughout fp4jax.

=======  =======================================================================
letter   meaning
=======  =======================================================================
b, t     batch and sequence (tokens)
d, f     model width and feed-forward width
h        attention heads
m, n, k  rows, columns and contraction of a product ``lhs[m, k] · rhs[k, n]``
v        vocabulary
=======  =======================================================================
"""

from collections.abc import Hashable

import jax
import numpy as np

type Array = jax.Array
type ArrayLike = jax.Array | np.ndarray | float | int
type Key = jax.Array
type Axis = int | tuple[int, ...]
type AxisName = Hashable | tuple[Hashable, ...]
type DimensionNumbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
