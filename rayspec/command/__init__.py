"""Code of all commands and jobs: options from YAML files and flags, locations of files, the terminal, exit codes.

Belongs here: code that a second command would have to repeat. Does not: anything about rows, HTTP or clusters.
"""
