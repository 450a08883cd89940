"""What is of DeepEP's second interface, which is not here."""

_REASON = "DeepEP's V2 interface is not offered, V1's `Buffer` is"

NOT_OFFERED = dict.fromkeys(
    ("ElasticBuffer", "EPHandle", "get_physical_domain_size", "get_logical_domain_size"), _REASON
)


def refuse(name: str) -> ImportError:
    """Make what `from deep_ep import name` raises."""
    return ImportError(f"cannot import {name!r} from 'deep_ep' (of deep_ep_py): {NOT_OFFERED[name]}", name=name)
