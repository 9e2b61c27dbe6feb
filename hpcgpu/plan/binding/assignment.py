"""The assignment problem: a column for each row, at the least cost."""

from __future__ import annotations

from collections.abc import Sequence

_INFINITE = 10**40


def assign(costs: Sequence[Sequence[int]]) -> list[int]:
    """Return a column for each row, all different, with the least sum of costs.

    The Hungarian method by shortest augmenting paths (R. Jonker and A. Volgenant, Computing 38, 1987), in whole
    numbers: nothing is rounded. Of equal columns the first is taken.

    Parameters
    ----------
    costs : sequence of sequence of int
        Rows of equal length, not more rows than columns.

    """
    rows, columns = len(costs), len(costs[0]) if costs else 0
    row_price, column_price = [0] * rows, [0] * columns
    owner = [-1] * columns
    for row in range(rows):
        # Dijkstra from the new row to the nearest free column, over reduced costs.
        length, came_from, open_columns = [_INFINITE] * columns, [-1] * columns, list(range(columns))
        done: list[int] = []
        column, at, base = -1, row, 0
        while True:
            price, line = base - row_price[at], costs[at]
            for j in open_columns:
                way = price + line[j] - column_price[j]
                if way < length[j]:
                    length[j], came_from[j] = way, column
            column = min(open_columns, key=length.__getitem__)
            base = length[column]
            if owner[column] < 0:
                break
            open_columns.remove(column)
            done.append(column)
            at = owner[column]
        row_price[row] += base
        for j in done:
            row_price[owner[j]] += base - length[j]
            column_price[j] -= base - length[j]
        while column >= 0:
            before = came_from[column]
            owner[column] = owner[before] if before >= 0 else row
            column = before
    found = {r: j for j, r in enumerate(owner) if r >= 0}
    return [found[r] for r in range(rows)]
