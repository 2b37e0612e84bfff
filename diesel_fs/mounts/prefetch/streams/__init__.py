"""The streams of the prefetch planner: readers whose orders of files are known. Pure.

The planner (`../planner.py`) asks these parts which unit of an order is next, and reports opens,
READs and changes of plans to them. Start with `stream_tracker.py`, which explains the positions of
one stream and names its parts: `stream_order.py`, `reader_position.py`, `claims.py`, `markers.py`,
`units_ahead.py` and `lateness.py`.

Over all streams: `changes.py` announces, extends, replaces and withdraws them; `stream_views.py`
answers questions; `signs.py` finds the reader that made a READ; `watches.py` merges the markers to
watch; `units.py` cuts an order into pushes.

One rule: only `changes.py` adds or removes a stream.
"""
