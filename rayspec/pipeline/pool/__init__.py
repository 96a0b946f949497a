"""Several engines behind one door: each is an actor, started beside the others and replaced alone.

Here belongs what knows nothing of documents, requests and HTTP: who gets an item, what becomes of items whose engine
died, and how items travel. What an engine does with an item is the `Recipe`'s business.
"""
