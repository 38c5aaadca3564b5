"""How capture reaches a transformers model: its attention routed through a recorder, and its masks checked."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tilewise.layout import Visibility

IMPLEMENTATION = "tilewise_capture"
# keyword arguments of an attention call that change the softmax and that a plain (q, k, v, scale) cannot express
FOREIGN_ARGUMENTS = ("softcap", "position_bias", "s_aux", "cu_seq_lens_q", "cu_seq_lens_k")
MASK_ROWS_AT_ONCE = 1024
ADVICE = "padded, packed and prefix batches are not kept; capture one unpadded sequence at a time"


@contextlib.contextmanager
def recording(model: Any, record: Callable[..., None]) -> Iterator[None]:
    """Call `record(module, query, key, value, mask, extra)` before every attention call of the model.

    The model's own attention still computes the outputs, in evaluation mode. Afterwards, also after an error, the
    attention implementation and every module's training mode are what they were. Tensors are `[B, H, T, D]`.

    Raises:
        ImportError: transformers is not installed.
        NotImplementedError: a model that does not look its attention up in `AttentionInterface`.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("capture needs transformers: pip install 'tilewise[hf]'") from error
    if not hasattr(model, "set_attn_implementation"):
        raise NotImplementedError(f"model: expected a transformers PreTrainedModel, got {type(model).__name__}")
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    training = {name: module.training for name, module in model.named_modules()}
    own = before[id(model.config)]
    original = AttentionInterface().get(own)  # None for "eager": the function lies in the model's own file

    def recorder(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **extra: Any) -> Any:
        record(module, query, key, value, mask, extra)
        call = original or sys.modules[type(module).__module__].eager_attention_forward
        return call(module, query, key, value, mask, **extra)

    AttentionInterface.register(IMPLEMENTATION, recorder)
    masks = AttentionMaskInterface()
    # without a mask function of the same name the model would pass mask=None, also for a padded batch
    AttentionMaskInterface.register(IMPLEMENTATION, masks[own if own in masks else "sdpa"])
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        if model.config._attn_implementation != IMPLEMENTATION:
            raise NotImplementedError(
                f"model: {type(model).__name__} does not look its attention up in AttentionInterface; "
                "expected one of the transformers models that do"
            )
        model.eval()
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        for name, module in model.named_modules():
            module.training = training[name]
        for interface in (AttentionInterface, AttentionMaskInterface):  # they have register, but no way back
            interface._global_mapping.pop(IMPLEMENTATION, None)


def check_arguments(number: int, extra: dict[str, Any]) -> None:
    """Refuse attention that is more than a softmax of scaled products."""
    foreign = [name for name in FOREIGN_ARGUMENTS if extra.get(name) is not None]
    if foreign:
        raise NotImplementedError(f"layer {number}: expected attention of q, k, v and a scale alone, got {foreign} too")


def check_positions(number: int, positions: Tensor | None) -> None:
    """Refuse position ids that restart or repeat: several sequences packed into one row."""
    if positions is None or positions.dim() != 2 or positions.shape[1] < 2:
        return
    if bool((positions[:, 1:] - positions[:, :-1] != 1).any()):
        raise ValueError(
            f"layer {number}: expected position_ids that rise by 1, got a padded or packed batch; capture one unpadded "
            "sequence at a time"
        )


def check_mask(number: int, mask: Tensor | None, visibility: Visibility) -> None:
    """Refuse a mask that hides or shows other keys than the layout does. `mask`: [B, T_k], or [B, H, T_q, T_k]."""
    rows, keys = visibility.query_length, visibility.key_length
    if mask is None:
        return  # transformers leaves the mask out only where is_causal and sliding_window say it all
    if mask.dim() == 2:
        if not bool((mask != 0).all()):
            raise ValueError(f"layer {number}: expected a mask without padding, got zeros in it; {ADVICE}")
        return
    mask = mask[..., :keys]
    shows = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    first, end = visibility.key_range(mask.device)
    key = torch.arange(keys, device=mask.device)
    for begin in range(0, rows, MASK_ROWS_AT_ONCE):
        row = slice(begin, begin + MASK_ROWS_AT_ONCE)
        expected = (key >= first[row, None]) & (key < end[row, None])
        if bool((shows[:, :, row] != expected).any()):
            kind = "causal" if visibility.causal else "full"
            kind = kind if visibility.window is None else f"sliding-window ({visibility.window} keys)"
            raise ValueError(f"layer {number}: expected a {kind} mask, got another one; {ADVICE}")
