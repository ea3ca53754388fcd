"""Kernels for NVIDIA GPUs, in Triton."""
