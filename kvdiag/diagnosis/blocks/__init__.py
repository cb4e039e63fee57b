"""KV blocks: expected, held, wasted, returned late."""
