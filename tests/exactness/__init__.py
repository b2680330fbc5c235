"""The exactness suite: models, settings, the plain torch loop that says what is right, and the comparison."""
