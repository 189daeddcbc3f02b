"""Stand-in of ``habana_frameworks.torch``; importing it makes ``hpu_backend`` known to ``torch.compile``.

The mode is that of the environment at this moment, or the default of the version.
"""

from habana_frameworks.torch.dynamo import register
from habana_frameworks.torch.utils.internal import is_lazy

register()
is_lazy()
