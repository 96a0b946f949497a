"""A model in shards: Ray actors, messages between them, the coordinator, placement, recovery, tensor parallelism.

Belongs here: whatever needs more than one process to decode. Does not: rows of datasets (batch/) and HTTP (serve/).
"""
