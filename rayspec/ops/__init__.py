"""Tools for operators: layouts for a cluster (plan, placement), checks of a cluster (doctor), Kubernetes manifests.

Belongs here: commands for operators, which nothing else imports; and `plan/`, which is a separate layer, because the
Python API asks it for a layout. Does not: anything that a run needs while it runs.
"""
