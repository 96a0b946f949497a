"""Comparisons of strategies, of pipelines, of endpoints and of jobs, in one run each."""
