"""The makers of a Timeline: live sampling, active test steps, a recorded trace. None of them judges."""
