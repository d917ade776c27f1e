"""Figures: pure functions from records (or a small dataclass) to a :class:`~kit.figures.figure.Figure`.

One module per figure, one shared style. Nothing here measures, reads files or knows a notebook.
"""
