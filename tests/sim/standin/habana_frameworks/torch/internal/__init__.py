"""Stand-in of ``habana_frameworks.torch.internal``."""
