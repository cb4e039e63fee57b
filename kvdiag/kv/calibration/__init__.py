"""Predicted against reported figures of a running engine."""
