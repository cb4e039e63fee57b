"""KV blocks: how many the tokens need, how many are held, wasted, returned late, or lost by a tier behind the pool.

Counts are compared as counts: a block's bytes are known only where the engine or the model's config gives them.
"""
