"""Whether this machine, and a cluster, can run rayspec; and what to do where they cannot."""
