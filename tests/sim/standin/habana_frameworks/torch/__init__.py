"""Stand-in of ``habana_frameworks.torch``; importing it makes ``hpu_backend`` known to ``torch.compile``."""

from habana_frameworks.torch.dynamo import register

register()
