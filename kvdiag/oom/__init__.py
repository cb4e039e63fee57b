"""Parses texts about out-of-memory failures into values."""
