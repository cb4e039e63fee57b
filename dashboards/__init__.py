"""The Grafana boards, made from Python: `python -m dashboards.generate` writes the JSON beside this file."""
