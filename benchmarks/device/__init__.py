"""What a step launches, reads and costs on a device: `python -m benchmarks.device`."""
