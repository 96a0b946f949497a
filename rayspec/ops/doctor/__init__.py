"""Checks whether this machine and a cluster can run rayspec, with a remedy for each problem."""
