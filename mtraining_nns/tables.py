"""Tables for the terminal."""


def align(rows: list[list[str]]) -> str:
    """Rows of cells under one another, each column as wide as its widest cell, numbers and words to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
