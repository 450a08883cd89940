"""The needs of normal mode."""

from __future__ import annotations

from deep_ep_py.base.arguments import wrong_id
from deep_ep_py.base.native import C
from deep_ep_py.modes.normal.rows import type_text
from deep_ep_py.session.needs import Needs

NORMAL = Needs(
    call_words=C.normal.CALL_WORDS,
    stats=("dispatches", "cached_dispatches", "combines", "direct", "expanded_by_senders", "rounds", "copied"),
    explain=wrong_id,
    words={
        "type of x": type_text,
        "topk_weights": lambda given: "given" if given else "None",
        "do_expand or DEEP_EP_EXPAND": lambda code: ("not expanded", "by the receiver", "by senders")[code],
    },
)
