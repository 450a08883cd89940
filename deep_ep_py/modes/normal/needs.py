"""The needs of normal mode."""

from __future__ import annotations

from deep_ep_py.core.arguments import wrong_id
from deep_ep_py.core.native import C
from deep_ep_py.session.needs import Needs

NORMAL = Needs(
    call_words=C.normal.CALL_WORDS,
    stats=("dispatches", "cached_dispatches", "combines", "direct", "expanded_by_senders", "rounds", "copied"),
    explain=wrong_id,
)
