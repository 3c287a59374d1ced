"""Actors: environments played, transitions published."""
