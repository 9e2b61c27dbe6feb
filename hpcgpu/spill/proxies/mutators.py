"""The operations that write to their object: methods, indexers and functions of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

# Methods that write to their object, of arrays, lists, dicts, sets and data frames.
METHODS = frozenset(
    """
    fill sort partition put itemset resize byteswap setfield setflags
    append extend insert pop remove reverse clear update setdefault popitem add discard
    difference_update intersection_update symmetric_difference_update
    """.split()  # a list of so many quoted words is not easier to read
)
# Methods of data frames that write with inplace=True.
INPLACE_METHODS = frozenset(
    """
    drop dropna fillna ffill bfill replace rename rename_axis reset_index set_index sort_values sort_index
    drop_duplicates query eval clip interpolate mask where
    """.split()
)
# Attributes through which code writes to the object.
INDEXERS = frozenset({"loc", "iloc", "at", "iat", "__cuda_array_interface__", "__dlpack__"})
# Functions of numpy that write to their first argument.
_FILLS = {np.copyto, np.put, np.place, np.putmask, np.fill_diagonal, np.put_along_axis}


def written_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that a numpy function writes to."""
    first = function in _FILLS or getattr(function, "__name__", "") == "at"  # np.add.at
    if first or kwargs.get("copy") is False or kwargs.get("overwrite_input"):
        return args[:1], kwargs
    return kwargs.get("out")
