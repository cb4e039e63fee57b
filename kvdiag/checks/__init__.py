"""The checks of `kvdiag doctor`: whether each source can be read here, and what to change if not.

Each module judges what one source returned and reads nothing itself: `kvdiag/commands/doctor.py` does that. An id is
`source.question`, and stays the same from version to version.
"""
