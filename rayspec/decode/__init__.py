"""The engine: requests become rounds of draft, verify, accept and commit. No Ray.

Belongs here: the engine, sampling, KnapSpec, lookup and `auto`, and the `Stages` it runs on. Does not: the other
methods of the papers (strategies/), more than one process (pipeline/).
"""
