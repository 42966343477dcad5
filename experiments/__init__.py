"""The paper's questions, each a folder with a config, a README and results: `python -m experiments list|run|report`.

See docs/experiments.md. Nothing here trains by itself: every piece runs through `fp4jax.train`.
"""
