"""Timelines from the history that a Prometheus holds."""
