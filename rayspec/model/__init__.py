"""The model in one process: how its layers split, the one forward, attention, the KV cache, loading and offloading.

Belongs here: torch and transformers. Does not: drafts, requests, Ray.
"""
