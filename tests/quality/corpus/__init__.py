"""A corpus of memory incidents as timelines: what public reports tell of each, and what had to be assumed for the rest.

`incidents()` makes the reported ones, `nulls` and `leaks` draw healthy and leaking memory of every component. Pure and
seeded: the same on every machine. The answers stand in expected.json and nowhere in a trace.
"""
