"""Measurements of tilewise and its peers: `python -m benchmarks.run OP`."""
