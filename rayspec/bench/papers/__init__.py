"""What papers have published, beside our own predictions."""
