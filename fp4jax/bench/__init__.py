"""`fp4jax bench`: the kernels, a linear layer and a whole train step, timed against their alternatives in one run.

Modules: ``config`` (the flags), ``measure`` (time on the device's own clock, and the peaks that it is compared with),
``baselines`` (XLA in BF16 and FP8, Flax's FP8, Qwix where it is installed), ``products`` (and the tuner of their
configurations), ``quantizers`` (and the exact quantile), ``networks`` (a linear layer, a train step), ``parts`` (which
part of a step a kernel is for), ``trace`` (what a device ran), ``least`` (what a step takes at least), ``profile``
(where its time goes), ``report`` (tables and JSON), ``run`` (the command).
"""
