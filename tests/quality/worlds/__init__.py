"""Servers from no report, drawn from public traces' statistics: a check of the diagnosis on unknown cases.

The thresholds were chosen on the corpus of incidents and on `corpus/drawn.py`. These servers have other load, other
noise and other exporters, and each states its verdict before it is judged. Seeds 1 to 3 may be looked at when
the diagnosis is changed; seeds 11 to 13 are for the score alone.
"""
