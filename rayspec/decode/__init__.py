"""The engine: it serves requests in rounds of draft, verify, accept and commit. No Ray.

Contains the engine, sampling, KnapSpec, lookup and `auto`, and the `Stages` that run the model. Other methods of the
papers are in strategies/; code for more than one process is in pipeline/.
"""
