"""The papers' other methods, one file each: CLaSp, SWIFT, Self-SD, DEL, KNN-SSD, LayerSkip, ASD, Lookahead.

Each implements `decode.selection.base.Selector`; `by_name` makes any strategy, KnapSpec and `auto` too.

Belongs here: how another method chooses its plan, and how it tunes one in advance (tuning.py). Does not: KnapSpec,
lookup and `auto`, which the engine is built around (decode/), and any forward pass.
"""
