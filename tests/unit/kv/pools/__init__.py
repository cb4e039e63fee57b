"""Pools of engines other than vLLM, against what those engines reported."""
