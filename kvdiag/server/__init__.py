"""The HTTP server of `kvdiag serve`: GET and HEAD of a few paths; no request causes a reading or a diagnosis."""
