"""Measurements of the project: run each as `python -m benchmarks.NAME`. They are not part of the package."""
