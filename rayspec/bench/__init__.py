"""Measuring: benchmarks of strategies, pipelines, jobs and the endpoint; figures; the papers' tables; tuning of plans.

Comparisons and plots belong here. Numbers that the engine itself uses do not (planning/, decode/profile.py).
"""
