"""The modes of `kvdiag diagnose`: Prometheus, several traces, crash artifacts."""
