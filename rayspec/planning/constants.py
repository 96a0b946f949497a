"""Constants of KnapSpec and `auto`, chosen by trial; the gate's constants are in `strategies.gate`.

docs/internals.md has one table of both. Constants that only bound memory or rounding are next to their use.
"""

from __future__ import annotations

# Number of tested draft tokens after which an observation counts half in estimates of acceptance.
TOKENS_HALF_LIFE = 512.0
# Weight of a prior expectation of acceptance, in tested tokens.
PRIOR_TOKENS = 8.0
# Logits added to estimates before any draft was in use: first plans on the demo model were estimated at 0.93 and
# reached 0.75, because the search computes its drafts from the target's own keys.
FIRST_OFFSET = -1.0
# Prior shares: of the tokens to be rejected, and of the tokens to be accepted, how many end their draft.
DETECTS, MISFIRES = 0.6, 0.05

# Number of committed tokens after which an observation about the text counts half: the next document may differ.
TEXT_HALF_LIFE = 16.0
# Speed-up over plain decoding beyond which no plan is expected to beat a round that uses lookup.
MAX_PLAN_GAIN = 2.5

# The first search is an investment: it may take this share of the time that its plan is expected to save.
FIRST_SEARCH_SHARE = 0.2
# Number of answers that ended by themselves, after which an earlier one counts half in the expected length of answers.
ANSWERS_HALF_LIFE = 8.0
# Rounds between two checks whether another known candidate is better now, or a search is due.
ROUNDS_TO_REVIEW = 16
# A search is due when context or batch change by more than this factor, or acceptance by more standard errors.
MAX_RATIO = 1.5
NUM_ERRORS = 3.0
# Minimum tokens of one sequence between two searches, and the bound for it after searches that changed nothing.
COOLDOWN_TOKENS = 64
MAX_PATIENCE_TOKENS = 16384
# Attention to few keys is a choice only if it takes less than this share of the time with all keys.
FEW_KEYS_COST = 0.9
# Width of the band of saved times in which the search keeps states, as a share of the most time that can be saved.
BAND = 0.2
