"""Rows in, rows out: documents, prompts, results, run folders, and the Ray Data jobs that stream one to the other.

Belongs here: reading input, what is asked about a document, who owns the engine of a job, what is written and resumed.
Does not: the OpenAI protocol (openai/), HTTP (serve/), benchmarks of a job (bench/).
"""
