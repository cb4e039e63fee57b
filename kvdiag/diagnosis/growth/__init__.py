"""Growth of memory: one vocabulary of components, one estimator over hours, exact tests over equal test cycles.

`memory_series` turns a timeline into one series for each component of each process or device; `estimator` decides
whether a series grows; `growth_verdicts` puts that into a finding; `attribution` and `host_caches` say whose growth it
is. Where a run offered equal load cycles, `equal_cycles` and `soak_*` judge the samples after each cycle instead.
"""
