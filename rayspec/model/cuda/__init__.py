"""The operations of a static step: attention over pages, norms, rotation and gating, as torch operators.

Belongs here: Triton kernels, their launches, the operators and their plain torch implementation. Does not: modules,
plans, sequences.
"""
