"""End with 0 if the server of this container is alive, else with 1: the container's health check."""

import os
import sys
from urllib.request import urlopen

try:
    with urlopen(f"http://127.0.0.1:{os.environ.get('PORT', '8000')}/live", timeout=5) as answer:
        sys.exit(answer.status != 200)
except OSError as error:
    sys.exit(str(error))
