"""Portable Triton kernels: every GPU that Triton serves, and the CPU interpreter."""
