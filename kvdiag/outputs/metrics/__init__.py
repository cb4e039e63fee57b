"""The metrics endpoint's answer."""
