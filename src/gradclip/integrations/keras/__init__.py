"""Keras 3 on TensorFlow, JAX and torch: `clipped`, which makes an optimizer clip."""

from .optimizer import ClippedOptimizer, clipped

__all__ = ["ClippedOptimizer", "clipped"]
