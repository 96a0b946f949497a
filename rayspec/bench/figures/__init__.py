"""KnapSpec's experiments, run and drawn."""
