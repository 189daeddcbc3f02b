"""Stand-in of ``habana_frameworks.torch.distributed``."""
