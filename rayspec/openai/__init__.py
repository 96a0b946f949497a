"""OpenAI's protocol without HTTP: request bodies, and responses as a whole, in chunks, or in batch files.

Belongs here: what the protocol says. Does not: connections, headers, admission (serve/). The `openai` package is not
imported; the tests compare responses with it.
"""
