"""Draw docs/figures/compare.svg: mass left out against density on the shipped sample, over all captured rows."""

from __future__ import annotations

from pathlib import Path

from tilewise.capture import load_capture, sample_path
from tilewise.diagnose.curve import block_mass, curve
from tilewise.diagnose.figures import curve_figure

BLOCK = 64
SELECTORS = ("pooled", "pooled + first block", "oracle")
TARGET = Path(__file__).parents[1] / "docs" / "figures" / "compare.svg"


def main() -> None:
    points = []
    for number, layer in load_capture(sample_path()).layers.items():
        points += curve(number, layer, BLOCK, block_mass(layer, BLOCK))
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(curve_figure(points, SELECTORS, text_as_paths=True), encoding="utf-8")
    print(f"wrote {TARGET} ({TARGET.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
