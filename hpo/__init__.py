"""Hyperparameter search for multitask transformer encoders with numeric precision as a searched dimension."""

__version__ = "0.1.0"
