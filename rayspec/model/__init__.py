"""The model in one process: its split into sublayers, their forward, attention, KV cache, loading and offloading.

Code here uses torch and transformers. It does not know drafts, requests or Ray.
"""
