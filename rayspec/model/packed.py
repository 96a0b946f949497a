"""GPTQ and AWQ checkpoints, whose linear layers have several levels of 2, 4 or 8 bits in each number. transformers
needs a package with CUDA kernels for them; here their weights become plain matrices while transformers loads them.

A weight [out, in] is (levels - zeros) * scales, with a scale [groups, out] and a zero for each group of columns:

    GPTQ: qweight [in / n, out], qzeros [groups, out / n], scales, and g_idx [in], the group of each column
    AWQ: qweight [in, out / n], qzeros [groups, out / n], scales

A number has n levels, the first in its lowest bits, but in AWQ in the order 0, 2, 4, 6, 1, 3, 5, 7. GPTQ's first format
stores numbers of zeros less one for each zero, its second format as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

_METHOD = "rayspec-packed"
_PARTS = _LEVELS, _ZEROS, _SCALES, _GROUPS = "qweight", "qzeros", "scales", "g_idx"
# Where a number of AWQ has its levels 0 to 7.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_NUMBERS = re.compile(r"\d+")


def can_unpack(settings: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint with this quantization_config has one of the layouts above."""
    bits, method = settings.get("bits"), settings.get("quant_method")
    if method == "gptq":
        layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
        return bits in (2, 4, 8) and layout in ("gptq", "gptq_v2")
    layout = settings.get("version") or settings.get("format") or "gemm"
    return method == "awq" and bits == 4 and str(layout).lower() == "gemm"


def for_unpacking(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quantization_config by which transformers loads such a checkpoint with an `Unpacker`."""
    is_awq = settings["quant_method"] == "awq"
    stores_zeros_less_1 = not is_awq and (settings.get("checkpoint_format") or settings.get("format")) != "gptq_v2"
    return {"quant_method": _METHOD, "is_awq": is_awq, "zero_offset": int(stores_zeros_less_1)}


@register_quantization_config(_METHOD)
class PackedConfig(QuantizationConfigMixin):
    def __init__(self, *, is_awq: bool, zero_offset: int, **_: Any) -> None:
        self.quant_method: Any = _METHOD
        self.is_awq, self.zero_offset, self.dequantize = is_awq, zero_offset, True


@register_quantizer(_METHOD)
class Unpacker(HfQuantizer):
    """Makes plain matrices of packed weights, also of experts that transformers merges afterwards."""

    quantization_config: PackedConfig
    requires_calibration = False
    is_trainable = False

    def __init__(self, settings: PackedConfig, **options: Any) -> None:
        super().__init__(settings, **options)
        self.serialized_names = {"weight": ["weight", *_PARTS]}  # some experts may be plain

    def is_serializable(self) -> bool:
        return True

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        return {"dequantize": _Unpack}

    def get_weight_conversions(self) -> list[WeightConverter]:
        return [WeightConverter([*_PARTS], "weight", [_Unpack(self)])]

    def _process_model_before_weight_loading(self, model: Any, **keywords: Any) -> None:
        """Ignore biases that the model does not have, unless one is not zero. Some GPTQ checkpoints have one for each
        layer. Refuse experts that transformers would merge before they are unpacked."""
        if any(weight.ndim > 2 for weight in model.parameters()) and not hasattr(HfQuantizer, "serialized_names"):
            raise ImportError("GPTQ and AWQ checkpoints of models with experts need transformers 5.23 or later")
        own = {_NUMBERS.sub("", name) for name, _ in model.named_parameters()}
        files = keywords.get("checkpoint_files") or ()
        for file in [file for file in files if file.endswith(".safetensors")]:
            with safe_open(file, "pt") as tensors:
                names: list[str] = list(tensors.keys())
                biases = [name for name in names if name.endswith(".bias") and _NUMBERS.sub("", name) not in own]
                if any(tensors.get_tensor(name).count_nonzero() for name in biases):
                    return
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), r"\.bias$"}


class _Unpack(ConversionOps):
    def __init__(self, quantizer: Unpacker) -> None:
        self.hf_quantizer = quantizer  # by this attribute transformers knows that it must not convert the numbers

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self, input_dict: dict[str, list[Tensor]], *, full_layer_name: str, model: nn.Module, **_: Any
    ) -> dict[str, list[Tensor]]:
        """input_dict: the tensors of each pattern of names, several for experts. Return weights for each pattern."""
        dtype, weights = model.get_parameter(full_layer_name).dtype, {}
        for name, tensors in input_dict.items():
            if name.endswith(".weight"):
                weights[name] = [tensor.to(dtype) for tensor in tensors]
            if _LEVELS not in name:
                continue
            parts = [input_dict[name.replace(_LEVELS, part)] for part in (_LEVELS, _ZEROS, _SCALES)]
            groups: Sequence[Any] = input_dict.get(name.replace(_LEVELS, _GROUPS)) or [None] * len(parts[0])
            place = full_layer_name if name == _LEVELS else name  # further operations look for experts by the pattern
            weights[place] = [self._weight(*layer).to(dtype) for layer in zip(*parts, groups, strict=True)]
        return weights

    def _weight(self, levels: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor | None) -> Tensor:
        """Return the weight [out, in] in float32."""
        settings = self.hf_quantizer.quantization_config
        num_bits = 8 * zeros.element_size() * zeros.shape[1] // scales.shape[1]
        columns = _unpacked(levels, num_bits, settings.is_awq)
        if not settings.is_awq:  # [in / n, out, n]
            columns = columns.transpose(1, 2)
        columns = columns.reshape(-1, scales.shape[1])
        ones = sum(1 << place for place in range(0, 8 * zeros.element_size(), num_bits))
        zeros = _unpacked(zeros + settings.zero_offset * ones, num_bits, settings.is_awq)  # a zero of 0 has borrowed
        if group_of is None:
            group_of = torch.arange(len(columns), device=levels.device) // (len(columns) // len(scales))
        chosen = group_of.long()
        weight: Tensor = (columns - zeros.flatten(1)[chosen]) * scales.float()[chosen]
        return weight.T.contiguous()


def _unpacked(numbers: Tensor, num_bits: int, is_awq: bool) -> Tensor:
    """Return the n levels of each number as a last dimension."""
    order = _AWQ_ORDER if is_awq else range(8 * numbers.element_size() // num_bits)
    shifts = torch.tensor([num_bits * place for place in order], dtype=numbers.dtype, device=numbers.device)
    levels: Tensor = (numbers[..., None] >> shifts) & (2**num_bits - 1)
    return levels
