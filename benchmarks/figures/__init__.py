"""Run KnapSpec's experiments, and plot them."""
