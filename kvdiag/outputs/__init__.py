"""Renderers: a Diagnosis in, a value out. None of them opens a file, and none of them judges."""
