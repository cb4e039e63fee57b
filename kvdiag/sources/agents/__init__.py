"""What the agents in a server's processes write: publications, black boxes, profiles. Nothing in a file is trusted."""
