"""The exporter's metrics page."""
