"""What a model would do on hardware that is not here."""
