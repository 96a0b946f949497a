"""The strategies, one file for each method: how rounds draft.

Each implements `decode.strategy.Strategy`; `by_name` makes them, and `gate.Gated` switches drafting off where it is
slower. Belongs here: how a method chooses its plan, and how it tunes one in advance (tuning.py). Does not: any forward
pass, and decisions that are functions of numbers (planning/).
"""
