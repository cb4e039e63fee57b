"""What kvdiag would have seen of a server, as plain values: single ones, servers with knobs, whole runs.

Pure: no clock, no randomness, no I/O.
"""
