"""What normal mode needs of a session."""

from __future__ import annotations

from deep_ep_py.core.native import C
from deep_ep_py.session.needs import Needs


def _explain(wrong_id: int) -> ValueError:
    return ValueError(
        f"topk_idx: an earlier get_dispatch_layout met the id {wrong_id}, expected -1 or an expert's; it has "
        "counted it as none"
    )


NORMAL = Needs(
    call_words=C.normal.CALL_WORDS,
    stats=("dispatches", "cached_dispatches", "combines", "direct", "rounds", "copied"),
    explain=_explain,
)
