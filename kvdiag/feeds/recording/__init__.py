"""Timelines on disk: traces, and the folder of a daemon's recordings."""
