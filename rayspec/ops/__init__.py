"""Around a run: which layout fits a cluster (plan, placement), what is wrong with it (doctor), Kubernetes manifests.

Belongs here: what operators call and nothing else imports; and `plan/`, which has a floor of its own, because the
Python API asks it for a layout. Does not: anything that a run needs while it runs.
"""
