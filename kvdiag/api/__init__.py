"""kvdiag in Python, for notebooks and for engine developers' tests; `kvdiag` itself exports all of it, lazily.

Two values: a `History` is what was recorded of one server, from a file or a Prometheus; a `Diagnosis` is the verdict on
it. Everything else is a function that makes one of them. The commands use none of this, and it adds no judgement.
"""
