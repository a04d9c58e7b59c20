"""Tensor parallelism of models that know nothing of it."""
