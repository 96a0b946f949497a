"""Programs that make files of the project. They are not part of the package."""
