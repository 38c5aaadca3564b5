"""Kernels and their operators."""
