"""A model in shards: Ray actors, messages between them, the coordinator, placement, recovery, tensor parallelism.

This package contains all code for decoding in more than one process, but no dataset rows (batch/) or HTTP (serve/).
"""
