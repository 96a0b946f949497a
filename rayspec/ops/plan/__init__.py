"""The planner: the predicted performance of a model on hardware that is not here, and the best layout for it.

Belongs here: decisions from sizes and rooflines, for the commands, for manifests and for `LLM(parallel="auto")`.
Does not: commands, and output for Kubernetes.
"""
