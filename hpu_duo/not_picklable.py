"""Objects that cannot be copied or pickled."""

from __future__ import annotations

from typing import NoReturn


class NotPicklable:
    """A part of a loaded model: its stores, captured graphs and patched layers belong to one process."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise TypeError for ``copy.copy``, ``copy.deepcopy`` and pickling, all of which call this.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"cannot copy or pickle {type(self).__name__}: the caches, graphs and layers of a loaded model "
            "belong to one process and one object; load the checkpoint again with from_pretrained"
        )
