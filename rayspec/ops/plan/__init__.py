"""The planner: the predicted performance of a model on hardware that is not here, and the best layout for it."""
