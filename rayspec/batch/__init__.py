"""Batch jobs: they read documents, make prompts, stream rows through engines with Ray Data, and write run folders.

Belongs here: reading input, making prompts from documents, owning the engines of a job, writing and resuming output.
Does not: the OpenAI protocol (openai/), HTTP (serve/), benchmarks of a job (bench/).
"""
