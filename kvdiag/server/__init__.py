"""The HTTP server of `kvdiag serve`: GET and HEAD of a few paths; no request causes a read or a diagnosis."""
