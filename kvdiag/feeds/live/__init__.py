"""Samples of a live server."""
