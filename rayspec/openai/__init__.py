"""OpenAI's protocol without HTTP: what a body asks of an engine, and the answer, at once, in chunks, or as a file.

Belongs here: what the protocol says. Does not: connections, headers, admission (serve/). The `openai` package is not
imported; the tests compare responses with it.
"""
