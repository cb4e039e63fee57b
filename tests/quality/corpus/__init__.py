"""A corpus of memory incidents as timelines: the facts of public reports, and assumptions where they have none.

`incidents()` makes the reported ones, `nulls` and `leaks` draw healthy and leaking memory of every component. Pure and
seeded: the same on every machine. The answers are in expected.json and in no trace.
"""
