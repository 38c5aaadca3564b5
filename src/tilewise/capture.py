"""Save a transformers model's Q, K, V as attention sees them: after RoPE, K and V not repeated, [B, T, H, D].

One file holds some layers of one forward pass (safetensors, tensors `layers.<i>.q|k|v`, the rest in its metadata).
Needs the extra `hf` to capture and `safetensors` (extra `cli`) to read; both are imported inside the functions.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.capture_hooks import check_arguments, check_mask, check_positions, recording
from tilewise.layout import Visibility

FORMAT = "tilewise-capture-1"


@dataclass(frozen=True)
class LayerCapture:
    """Q, K, V of one attention layer.

    Attributes:
        q: `[B, T_q, H_q, d_k]`, after RoPE; its rows are the last ones of the text (bottom-right alignment).
        k: `[B, T_k, H_kv, d_k]`, after RoPE, not repeated for the query heads.
        v: `[B, T_k, H_kv, d_v]`.
        scale: factor of the logits.
        causal: whether the model masks the future.
        window: keys a row sees, itself included, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool = True
    window: int | None = None

    @property
    def visibility(self) -> Visibility:
        """Which keys each captured row sees."""
        return Visibility(self.q.shape[1], self.k.shape[1], causal=self.causal, window=self.window)


@dataclass(frozen=True)
class Capture:
    """Some layers of one forward pass and where they come from.

    Attributes:
        layers: layer number -> its Q, K, V.
        metadata: free text fields (model, source, source_sha256, ...); all are strings.
    """

    layers: dict[int, LayerCapture]
    metadata: dict[str, str] = field(default_factory=dict)

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file and return its path; dtypes are kept as they are."""
        from safetensors.torch import save_file

        tensors = {
            f"layers.{number}.{name}": getattr(layer, name).detach().cpu().contiguous()
            for number, layer in self.layers.items()
            for name in ("q", "k", "v")
        }
        described = {
            str(number): {"scale": layer.scale, "causal": layer.causal, "window": layer.window}
            for number, layer in self.layers.items()
        }
        metadata = self.metadata | {"format": FORMAT, "layers": json.dumps(described)}
        save_file(tensors, str(path), metadata=metadata)
        return Path(path)


def load_capture(path: str | Path, device: torch.device | str = "cpu") -> Capture:
    """Read a file that `Capture.save` wrote.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a safetensors file of another format, or one that lacks a tensor.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"path: expected a capture (safetensors), found no file at {path}")
    try:
        file = safe_open(str(path), framework="pt", device=str(device))
    except SafetensorError as error:
        raise ValueError(f"path: expected a safetensors file, got {path} ({error})") from error
    with file:
        metadata = dict(file.metadata() or {})
        if metadata.get("format") != FORMAT:
            raise ValueError(
                f"path: expected a file of format {FORMAT!r}, got {metadata.get('format')!r} in {path}; "
                "tilewise.capture.capture writes such files"
            )
        names = set(file.keys())
        layers = {}
        for number, described in json.loads(metadata.pop("layers")).items():
            wanted = [f"layers.{number}.{name}" for name in ("q", "k", "v")]
            missing = [name for name in wanted if name not in names]
            if missing:
                raise ValueError(f"path: expected tensors {wanted} in {path}, missing {missing}")
            layers[int(number)] = LayerCapture(*(file.get_tensor(name) for name in wanted), **described)
    metadata.pop("format")
    return Capture(layers, metadata)


def sample_path() -> Path:
    """Path of the shipped sample: three layers of SmolLM2-135M-Instruct on 4,096 tokens of Python source."""
    return Path(__file__).parent / "data" / "smollm2-135m-argparse.safetensors"


@torch.no_grad()
def capture(
    model: Any,
    inputs: Tensor | Mapping[str, Any],
    layers: Sequence[int],
    path: str | Path | None = None,
    *,
    query_rows: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    metadata: Mapping[str, str] | None = None,
) -> Capture:
    """Run a transformers model once and keep Q, K, V of some layers, exactly as its attention function gets them.

    The model's own attention still computes the outputs; its state (attention implementation, training mode) is put
    back afterwards, also when the pass fails. Each layer's mask is compared with the causal (and sliding-window) one
    that the capture will stand for.

    Args:
        model: a transformers `PreTrainedModel` that looks its attention up in `AttentionInterface`.
        inputs: token ids `[B, T]`, or the keyword arguments of the model (`input_ids`, `attention_mask`, ...).
        layers: numbers of the attention layers to keep.
        path: where to write a safetensors file; None: only return the capture.
        query_rows: keep Q of only the last `query_rows` positions; K and V are kept in full.
        dtype: of the tensors kept.
        metadata: further fields, such as `source` and `source_sha256`.

    Returns:
        The `Capture`, on the CPU.

    Raises:
        ImportError: transformers is not installed (extra `hf`).
        ValueError: a layer that the model does not have, `query_rows` below 1, or a mask that is not plain causal,
            sliding-window or full: padded batches and packed sequences are refused, because their mask is not kept.
        NotImplementedError: a model without `AttentionInterface`, or attention with a soft cap, a sink or a bias.
    """
    if query_rows is not None and query_rows < 1:
        raise ValueError(f"query_rows: expected at least 1 or None, got {query_rows}")
    arguments: dict[str, Any] = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    parameters = inspect.signature(model.forward).parameters
    if "logits_to_keep" in parameters:
        arguments.setdefault("logits_to_keep", 1)  # the logits of all positions can be larger than the model
    if "use_cache" in parameters:
        arguments.setdefault("use_cache", False)
    kept: dict[int, LayerCapture] = {}
    seen: set[int] = set()

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, extra: dict) -> None:
        number = getattr(module, "layer_idx", None)
        if number is None:
            return
        seen.add(number)
        if number in kept:
            raise NotImplementedError(f"layers: expected one attention call in layer {number}, got a second one")
        if number in layers:
            kept[number] = _layer(module, number, query, key, value, mask, extra, query_rows, dtype)

    with recording(model, record):
        model(**arguments)
    missing = sorted(set(layers) - set(kept))
    if missing:
        raise ValueError(f"layers: expected numbers among {sorted(seen)}, got {missing}")
    fields = _describe(model, kept) | {key: str(value) for key, value in (metadata or {}).items()}
    result = Capture({number: kept[number] for number in sorted(kept)}, fields)
    if path is not None:
        result.save(path)
    return result


def text_fields(name: str, text: str) -> dict[str, str]:
    """Metadata fields for a source text: its name, its SHA-256 and its length in characters."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"source": name, "source_sha256": digest, "source_characters": str(len(text))}


def _describe(model: Any, kept: dict[int, LayerCapture]) -> dict[str, str]:
    import transformers

    keys = next(iter(kept.values())).k.shape[1]
    rows = next(iter(kept.values())).q.shape[1]
    return {
        "model": str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
        "rope": "applied",
        "key_positions": f"0:{keys}",
        "query_positions": f"{keys - rows}:{keys}",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }


def _layer(
    module: Any,
    number: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    extra: dict[str, Any],
    query_rows: int | None,
    dtype: torch.dtype,
) -> LayerCapture:
    """Check one attention call ([B, H, T, D] tensors) and keep it as [B, T, H, D]."""
    check_arguments(number, extra)
    is_causal = extra.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    rows, keys = query.shape[2], key.shape[2]
    window = extra.get("sliding_window")
    window = window if causal and window is not None and window < keys else None
    check_positions(number, extra.get("position_ids"))
    check_mask(number, mask, Visibility(rows, keys, causal=causal, window=window))
    scale = extra.get("scaling")
    q = query[:, :, max(0, rows - query_rows) :] if query_rows is not None else query
    q, k, v = (x.transpose(1, 2).to("cpu", dtype).contiguous() for x in (q, key, value))
    return LayerCapture(q, k, v, float(query.shape[-1] ** -0.5 if scale is None else scale), causal, window)
