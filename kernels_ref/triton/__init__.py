"""The parts as Triton kernels, for CUDA and, where there is none, for Triton's interpreter on CPU.

``parts`` implements ``kernels_ref.impl.Kernels``; every other public module has kernels and the functions
that launch them. Triton is imported when the first kernel is launched. See docs/gpu.md.
"""
