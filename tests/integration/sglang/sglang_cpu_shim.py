"""Lets SGLang's CUDA wheel start on a CPU without its kernels: what it names while it is imported is declared.

Only declared: calling a kernel that is not there fails, with its name. Installed into the environment of SGLang.
"""

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

KERNELS = (
    "fused_sigmoid_gating_delta_rule_update_cpu", "fused_sigmoid_mul_cpu", "fused_gdn_gating_cpu", "l2norm_cpu",
    "fused_qkvzba_split_reshape_cat_cpu", "fused_qkvzba_split_reshape_cat_contiguous_cpu", "causal_conv1d_weight_pack",
)  # fmt: skip
"""Operators of `sgl_kernel` that modules name when they are imported."""


class BeforeTorchvision:
    """Declares torchvision's two operators when torchvision is first imported, whose own library is another torch's."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Find nothing: other finders follow."""
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch  # noqa: PLC0415 - torchvision imports it anyway

        self.torchvision = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            self.torchvision.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        self.kernels = torch.library.Library("sgl_kernel", "FRAGMENT")
        for operator in KERNELS:
            self.kernels.define(f"{operator}(Tensor x) -> Tensor")
        # A library that is collected takes its declarations with it.
        torch.kvdiag_test_libraries = self


class NoKernels:
    """`sgl_kernel` without kernels: its names can be imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """A package for `sgl_kernel` and all in it but the one module that is plain Python elsewhere."""
        if name.split(".", maxsplit=1)[0] != "sgl_kernel" or name == "sgl_kernel.scalar_type":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # all that is asked of a loader

    def create_module(self, spec: Any) -> None:
        """An empty one."""

    def exec_module(self, module: ModuleType) -> None:
        """Give each of its names a function that fails."""

        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)

            def call(*_: Any, **__: Any) -> Any:
                raise NotImplementedError(f"sgl_kernel.{name} is not there: no kernels on this machine")

            return call

        module.__getattr__ = missing  # type: ignore[method-assign]  # PEP 562


sys.meta_path[:0] = [BeforeTorchvision()]
sys.meta_path.append(NoKernels())
