"""How the bundled models were trained."""
