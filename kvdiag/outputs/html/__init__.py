"""HTML: the report and the daemon's status page."""
