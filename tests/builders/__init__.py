"""What kvdiag observes of a server, as plain values: single values, configurable servers, whole runs.

Pure: no clock, no randomness, no I/O.
"""
