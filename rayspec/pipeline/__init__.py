"""A model in shards: Ray actors, messages between them, the coordinator, placement, recovery, tensor parallelism.

This package contains all code for decoding one model in more than one process. Several engines are in pool/.
"""
