"""Tools for operators: layouts for a cluster (plan, placement), checks of a cluster (doctor), Kubernetes manifests.
Nothing else imports these, except `plan/`, which the Python API asks for a layout."""
