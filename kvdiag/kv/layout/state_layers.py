"""State layers: what one request's state takes on one rank.

Shapes from vLLM model_executor/layers/mamba/mamba_utils.py::MambaStateShapeCalculator, number formats from
MambaStateDtypeCalculator. A state does not grow with the request, so there is no token in this file.
"""

from dataclasses import dataclass, fields

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import check_range

_LARGEST = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """The state of one layer, undivided: a convolution's last inputs and a recurrent matrix per head.

    `conv_channels` are divided over tensor-parallel ranks, as are `conv_groups` groups of `conv_group_channels`
    channels each, after groups were added so that they divide
    (MambaStateShapeCalculator.mamba2_state_shape, extra_groups_for_head_shards).
    `conv_steps` is the kernel size - 1; drafts lengthen it where `drafts_lengthen_conv`. `prefill_checkpoints` are
    state blocks that a prefill may write besides the running one (mamba_mixer2.py::get_kv_cache_spec).
    """

    conv_channels: int = 0
    conv_steps: int = 0
    drafts_lengthen_conv: bool = False
    recurrent_heads: int = 0
    recurrent_head_elements: int = 0
    conv_groups: int = 0
    conv_group_channels: int = 0
    recurrent_dtype: str | None = None
    prefill_checkpoints: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int):
                check_range(field.name, value, 0, _LARGEST)
        if self.conv_channels * self.conv_steps + self.recurrent_heads * self.recurrent_head_elements == 0:
            raise KvModelError("a state layer has neither a convolution nor a recurrent state", "recurrent_heads")

    def rank_bytes(
        self,
        *,
        tensor_parallel: int,
        speculative_tokens: int,
        conv_element_bytes: int,
        recurrent_element_bytes: int,
    ) -> int:
        """Bytes of one request's state in this layer on one rank."""
        groups = self.conv_groups
        if groups % tensor_parallel:
            groups = tensor_parallel
        channels = self.conv_channels + groups * self.conv_group_channels
        steps = self.conv_steps
        if self.drafts_lengthen_conv and channels:
            steps += speculative_tokens
        conv_elements = _share(channels, tensor_parallel, "convolution channels") * steps
        heads = _share(self.recurrent_heads, tensor_parallel, "recurrent heads")
        return conv_elements * conv_element_bytes + heads * self.recurrent_head_elements * recurrent_element_bytes


def _share(value: int, parts: int, what: str) -> int:
    if value % parts:
        raise KvModelError(f"tensor_parallel {parts} does not divide the {value} {what}", "tensor_parallel")
    return value // parts
