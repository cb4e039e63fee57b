"""Timelines of active tests: the workloads that kvdiag sends, and the samples taken meanwhile."""
