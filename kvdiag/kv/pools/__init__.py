"""Memory pools of engines that do not have vLLM's block manager: an arithmetic for each, and one shape of plan."""
