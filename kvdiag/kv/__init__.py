"""What a KV cache costs, as the engine counts it: pure arithmetic on a model's config and a deployment."""
