"""Saving, loading, pushing, and the cards that tell of it."""
