"""Measuring: benchmarks of strategies, pipelines, jobs and the endpoint; figures; the papers' tables; tuning of plans.

Belongs here: what compares and draws. Does not: a number that the engine itself goes by (planning/, decode/profile.py).
"""
