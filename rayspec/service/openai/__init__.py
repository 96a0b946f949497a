"""The OpenAI protocol: what bodies ask of an engine, and what is answered, at once, in chunks, or as a batch file.

Nothing here imports the `openai` package; the tests hold responses against it.
"""
