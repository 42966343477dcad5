"""The statistics once more, in NumPy float64, from the oracle's quantizers: nothing here is fp4jax's own code."""

import numpy as np
import oracle

QUICK = {"xla_backend_optimization_level": 0}
"""For `jax.jit(compiler_options=)`: these programs run once, and LLVM takes twice as long to make them fast."""

QUIET = {"over": "ignore", "invalid": "ignore", "divide": "ignore", "under": "ignore"}


def statistics(x, spec, axis, occ=None, clamp_axis=None, dtype=np.float32):
    """Every statistic of one operand as a float64; `dtype` is that of x, in which sparse compensation is added."""
    x = np.asarray(x)
    q = oracle.quantize_activation(x, spec, occ, axis, clamp_axis)
    exact = x.astype(np.float32).astype(np.float64)
    delta = np.zeros_like(exact) if q.residual is None else q.residual.astype(np.float64)
    kept = np.asarray(q.dequantized, np.float64)
    lost = q.values == 0
    if occ is not None and occ.compensation == "sparse":
        kept = kept + q.residual.astype(dtype).astype(np.float64)
        lost = lost & (delta == 0)
    moved = delta != 0
    error = exact - kept
    labels, shape = oracle.block_labels(x.shape, spec.granularity, axis)
    amax = oracle.block_max(x, labels, int(np.prod(shape)))
    scale = np.ones(amax.shape)
    scale[labels.ravel()] = np.broadcast_to(q.scale, x.shape).ravel()
    used = scale[amax > 0] if (amax > 0).any() else np.ones(1)
    n, energy = exact.size, np.sum(exact**2)
    carrier = None
    if occ is not None and occ.compensation == "residual" and occ.residual_format is not None:
        carrier = oracle.format_of(occ.residual_format).max
    ends = np.abs(q.values) >= oracle.format_of(spec.format).max
    with np.errstate(**QUIET):
        noise = np.sum(error**2)
        return {
            "snr_db": 10 * np.log10(energy / noise) if noise else np.inf,
            "cosine": np.sum(exact * kept) / np.sqrt(energy * np.sum(kept**2)),
            "mse": noise / n,
            "underflow": np.sum(lost & (exact != 0)) / max(1, np.sum(exact != 0)),
            "clipped": np.mean(ends | moved),
            "nonfinite": np.mean(~np.isfinite(exact)),
            "residual_share": np.mean(moved),
            "residual_energy": np.sum(delta**2) / energy,
            "residual_saturated": 0.0 if carrier is None else np.mean(np.abs(q.values[moved]) >= carrier),
            "scale_min": used.min(),
            "scale_max": used.max(),
            "scale_spread": np.log2(used.max() / used.min()),
            "amax": np.abs(exact).max(),
            "crest": np.abs(exact).max() / np.sqrt(energy / n),
        }


def assert_statistics(actual, expected):
    """Shares exactly (their counts are whole); the rest to the rounding of float32 sums of some thousand terms.

    The SNR is a difference of logarithms: a relative error of 1e-5 in either sum is 1e-4 dB.
    """
    counted = ("underflow", "clipped", "nonfinite", "residual_share", "residual_saturated")
    for name, value in expected.items():
        got = float(np.asarray(actual[name]))
        if name in counted:
            np.testing.assert_allclose(got, value, rtol=2e-7, atol=0, err_msg=name)
        elif name in ("snr_db", "scale_spread"):
            np.testing.assert_allclose(got, value, rtol=0, atol=1e-4, err_msg=name)
        else:
            np.testing.assert_allclose(got, value, rtol=1e-5, atol=0, err_msg=name)
