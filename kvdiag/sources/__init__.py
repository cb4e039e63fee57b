"""The only code that looks at the world; each file is a pure `parse` and a `read` with the I/O.

A source never judges. What it cannot see it reports as a `Gap`: `absent` where it does not exist, `failed` where it
should have answered.
"""
