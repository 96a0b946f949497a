"""A pool of engines: each engine is an actor, which is started and replaced independently of the others.

The pool decides which engine gets an item, gives the items of a dead engine to other engines, and transports items and
results. It knows nothing of documents, requests and HTTP: the `EngineFactory` says what an engine does with an item.
"""
