"""What is one engine's own: its metrics, startup log, settings and requests, a folder for each engine."""
