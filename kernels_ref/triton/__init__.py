"""The parts as Triton kernels, for CUDA and, where there is none, for Triton's interpreter on CPU.

``parts`` holds what ``kernels_ref.impl.Kernels`` asks for; every other public module holds one kernel
and the function that launches it, under the name of the module. Nothing imports Triton before a kernel
is launched. See docs/triton.md.
"""
