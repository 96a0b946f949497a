"""Numbers only: the knapsack, costs, acceptance, partition, simulation. numpy, no torch.

Belongs here: decisions as pure functions of numbers. Does not: tensors, clocks, processes.
"""
