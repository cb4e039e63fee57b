"""What a model's config class fills in where a config.json leaves a field out.

Published configs leave fields out: nested text configs hold only what differs from the class (gemma-3-4b names neither
heads nor head size nor vocabulary). The class is the one that vLLM 0.32.0 loads: its own
(transformers_utils/configs/NAME.py) where it has one, else transformers 5.19.0's (models/NAME/configuration_NAME.py).
Here are the fields that the KV cache depends on, and what published configs leave out of those that weights depend on.
"""

from collections.abc import Mapping

from kvdiag.kv.hf_defaults.attention import ATTENTION
from kvdiag.kv.hf_defaults.latent import LATENT
from kvdiag.kv.hf_defaults.state import STATE
from kvdiag.kv.hf_defaults.windowed import WINDOWED

HF_DEFAULTS: Mapping[str, Mapping[str, object]] = {**ATTENTION, **WINDOWED, **LATENT, **STATE}
