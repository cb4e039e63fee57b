"""The daemons of `kvdiag serve`: what they have in common, and the one of a fleet."""
