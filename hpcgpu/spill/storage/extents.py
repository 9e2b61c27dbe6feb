"""Free room inside files: by size, with neighbours as one."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

PAGE_BYTES = 4096

_F = TypeVar("_F")


class Extent(NamedTuple, Generic[_F]):
    """Whole pages of a file, from byte ``start`` on. Immutable; Segments and Extents make it."""

    file: _F
    start: int
    nbytes: int


class Extents(Generic[_F]):
    """Extents that do not touch each other; no call takes longer if there are many.

    Segments makes it, and calls it under its own lock only.

    Attributes
    ----------
    nbytes : int
        Of all extents; read without that lock, too.

    """

    def __init__(self) -> None:
        self.nbytes = 0
        # by first byte, and by end: no extent ends where another one starts
        self._edges: dict[_F, dict[int, Extent[_F]]] = {}
        # the last one in goes out first: its pages are in the cache
        self._bins: dict[int, dict[Extent[_F], None]] = {}
        self._filled = 0  # the bins that are not empty, as bits

    def add(self, extent: Extent[_F]) -> Extent[_F]:
        """Add an extent; return it, merged with its neighbours."""
        file, start, nbytes = extent
        edges = self._edges.get(file, {})
        if (before := edges.get(start)) is not None:
            self.remove(before)
            start, nbytes = before.start, before.nbytes + nbytes
        if (behind := edges.get(start + nbytes)) is not None:
            self.remove(behind)
            nbytes += behind.nbytes
        return self._put(Extent(file, start, nbytes))

    def remove(self, extent: Extent[_F]) -> None:
        """Take an extent out."""
        file, start, nbytes = extent
        number = _bin_of(nbytes)
        there, edges = self._bins[number], self._edges[file]
        there.pop(extent, None)
        del edges[start], edges[start + nbytes]
        if not there:
            self._filled ^= 1 << number
        if not edges:
            del self._edges[file]
        self.nbytes -= nbytes

    def take(self, nbytes: int) -> Extent[_F] | None:
        """Take so many bytes out, in one piece; None if no extent is that large."""
        number = _bin_of(nbytes)
        # popitem: to find the last item otherwise takes longer after others were removed (a dict keeps their slots)
        found = self._bins[number].popitem()[0] if self._filled >> number & 1 else None
        if found is None or found.nbytes < nbytes:
            if found is not None:
                self._bins[number][found] = None
            larger = self._filled >> number + 1
            if not larger:
                return None
            number += (larger & -larger).bit_length()
            found = self._bins[number].popitem()[0]
        file, start, there = found
        if there > nbytes and _bin_of(there - nbytes) == number:  # as each time when a file was made longer
            bin_, edges = self._bins[number], self._edges[file]
            del edges[start]
            rest = Extent(file, start + nbytes, there - nbytes)
            bin_[rest], edges[start + nbytes], edges[start + there] = None, rest, rest
            self.nbytes -= nbytes
        else:
            self.remove(found)
            if there > nbytes:
                self._put(Extent(file, start + nbytes, there - nbytes))
        return Extent(file, start, nbytes)

    def take_large(self) -> Extent[_F]:
        """Take one of the largest extents out; there is one."""
        found = self._bins[self._filled.bit_length() - 1].popitem()[0]
        self.remove(found)
        return found

    def take_file(self, file: _F) -> None:
        """Take all extents of a file out."""
        for extent in set(self._edges.get(file, {}).values()):
            self.remove(extent)

    def _put(self, extent: Extent[_F]) -> Extent[_F]:
        file, start, nbytes = extent
        number = _bin_of(nbytes)
        self._bins.setdefault(number, {})[extent] = None
        self._filled |= 1 << number
        edges = self._edges.setdefault(file, {})
        edges[start] = edges[start + nbytes] = extent
        self.nbytes += nbytes
        return extent


def _bin_of(nbytes: int) -> int:
    """Return the number of an extent's bin: up to 15 pages one for each size, then eight for each power of two."""
    pages = nbytes // PAGE_BYTES
    step = max(pages.bit_length() - 4, 0)
    return (step << 3) + (pages >> step)
