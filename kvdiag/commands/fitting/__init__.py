"""The parts of `kvdiag fit`."""
