"""Exit 0 where Triton kernels can run on the CPU; otherwise say why not and exit 1."""

import importlib.util
import sys


def obstacle() -> str | None:
    """What keeps Triton's interpreter from working here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    import numpy
    import triton

    version = tuple(int(part) for part in numpy.__version__.split(".")[:2])
    if version >= (2, 4) and triton.__version__.startswith("3.6."):
        return f"triton {triton.__version__} interprets with numpy below 2.4, and this is {numpy.__version__}"
    return None


if __name__ == "__main__":
    reason = obstacle()
    if reason is not None:
        print(f"kernels are not run on the CPU: {reason}")
    sys.exit(reason is not None)
