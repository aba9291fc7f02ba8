"""Benchmarks; run them from the repository root, like ``python -m benchmarks.transfer``."""
