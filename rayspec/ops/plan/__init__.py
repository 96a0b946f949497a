"""The planner: what a model would do on hardware that is not here, and which layout is best for it.

Belongs here: decisions from sizes and rooflines, for the commands, for manifests and for `LLM(parallel="auto")`.
Does not: commands, and whatever is written for Kubernetes.
"""
