"""The strategies, one file for each method: how rounds draft. Each implements `decode.strategy.Strategy`; `by_name`
makes them, and `gate.Gated` switches drafting off where it is slower. No forward pass; pure decisions: planning/."""
