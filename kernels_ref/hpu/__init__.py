"""The parts on the fused operators of Gaudi's software, where it has them; see docs/hpu-kernels.md."""
