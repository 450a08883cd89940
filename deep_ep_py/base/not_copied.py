"""Objects that stand for memory and connections of this process."""

from __future__ import annotations

from typing import Any, NoReturn


class NotCopied:
    """Base of classes whose objects are neither copied nor pickled."""

    _not_copied = (
        "nor can a model that holds one, since it stands for memory and connections of this process. Keep it outside "
        "of the model: the layers of deep_ep_py.moe and the ops of deep_ep_py.ops find a Buffer by the name that "
        "ops.register returns"
    )
    """The reason."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: cannot be copied or pickled, {self._not_copied}")
