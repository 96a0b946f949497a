"""Measuring: strategies side by side (`rayspec bench`), `rayspec selfcheck`, and tuning of plans (`rayspec tune`)."""
