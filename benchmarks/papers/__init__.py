"""Published results of papers, compared with our own predictions."""
