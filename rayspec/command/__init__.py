"""What every command and job shares: options from YAML files and flags, locations of files, the terminal, exit codes.

Belongs here: whatever a second command would otherwise write again. Does not: anything about rows, HTTP or clusters.
"""
