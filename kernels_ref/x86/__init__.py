"""Kernels in C++ for x86 CPUs that multiply pairs of bfloat16 in 512-bit vectors (AVX512-BF16).

On such a CPU torch's fused attention and oneDNN's products reach a third to a half of what the instructions
can do. The kernels here are prebuilt in some wheels, and need a C++ compiler at their first use in others;
without both torch's are used.
"""
