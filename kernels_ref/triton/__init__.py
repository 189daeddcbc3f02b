"""The parts as Triton kernels, for CUDA and, where there is none, for Triton's interpreter on CPU.

``parts`` implements ``kernels_ref.impl.Kernels``; every other public module holds one kernel and the function
that launches it, under the name of the module. Triton is imported when the first kernel is launched. See
docs/gpu.md.
"""
