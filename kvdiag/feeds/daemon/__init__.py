"""The timeline of a running daemon: watched, thinned, kept in little memory."""
