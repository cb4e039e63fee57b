"""Boards drawn without Grafana, for the pictures in the documents."""
