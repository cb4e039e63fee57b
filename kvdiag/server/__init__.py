"""The HTTP shell of `kvdiag serve`: GET and HEAD of a few paths; nothing is read or judged for a request."""
