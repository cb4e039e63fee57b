"""The feed of a fleet's daemon: what a Prometheus holds of each replica, read once and kept on disk."""
