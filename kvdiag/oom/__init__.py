"""Texts of out-of-memory failures: text in, values out."""
