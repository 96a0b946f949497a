"""The operations of a static step: attention over pages, norms, rotation and gating, as torch operators.

The folder has the Triton kernels, their launches, the operators, and a reference in plain torch. Code here does not
know modules, plans or sequences.
"""
