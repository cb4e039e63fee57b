"""Tests of what keeps a fleet's verdicts."""
