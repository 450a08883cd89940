"""Bugs that the tests must catch, each planted alone: the change, and the build and scenario that must detect it.

A change is a pair of texts; the first occurs exactly once in the file.
"""

from __future__ import annotations

from mutants import (
    expanded,
    fabrics,
    failures,
    low_latency,
    machines,
    masks,
    normal,
    once_per_node,
    operations,
    proxy,
    two_hops,
    two_hops_combine,
)

MUTANTS = (
    *expanded.MUTANTS,
    *fabrics.MUTANTS,
    *machines.MUTANTS,
    *proxy.MUTANTS,
    *operations.MUTANTS,
    *normal.MUTANTS,
    *failures.MUTANTS,
    *low_latency.MUTANTS,
    *once_per_node.MUTANTS,
    *masks.MUTANTS,
    *two_hops.MUTANTS,
    *two_hops_combine.MUTANTS,
)
