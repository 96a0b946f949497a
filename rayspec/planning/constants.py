"""Numbers that KnapSpec and `auto` go by, chosen by trying; the arbiter's are its options (`arbiter.ArbiterOptions`).

docs/internals.md has one table of both. What only bounds memory or rounding stands where it is used.
"""

from __future__ import annotations

# Tested draft tokens, after which one counts half in what is learned of acceptance.
TOKENS_HALF_LIFE = 512.0
# As so many tested tokens counts what is expected before there are any.
PRIOR_TOKENS = 8.0
# Standard deviations by which an estimate of acceptance is lowered: the best of many candidates is flattered most.
CAUTION = 0.5
# Logits to add to estimates before there is a draft in use: first plans on the demo model were estimated at 0.93 and
# had 0.75, because their tokens are drafted from the target's own keys.
FIRST_OFFSET = -1.0
# Of draft tokens that will be rejected, and of those that will be accepted: the share that ends the draft.
DETECTS, MISFIRES = 0.6, 0.05

# Committed tokens, after which one counts half in what is learned of the text: the next document may be another kind.
TEXT_HALF_LIFE = 16.0
# Where looked-up rounds make so many times the tokens per second of plain ones, no plan is expected to do better.
MOST_OF_PLANS = 2.5

# The first search is an investment: it may take this share of the work that is waiting.
FIRST_SEARCH_SHARE = 0.1
# Rounds between two looks at whether another known candidate is better now, or a search wanted.
ROUNDS_TO_REVIEW = 16
# A search is wanted when context or batch have changed by this factor, or acceptance by so many standard errors.
MAX_RATIO = 1.5
NUM_ERRORS = 3.0
# Tokens of a sequence between two searches, at least, and at most, however often they changed nothing.
COOLDOWN_TOKENS = 64
MAX_PATIENCE_TOKENS = 16384
# Of the time with all keys, below which few keys are a choice.
FEW_KEYS_COST = 0.9
# Share of the model's time, around which the search keeps states of different saved time.
BAND = 0.2
