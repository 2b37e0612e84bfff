"""The streams of the prefetch planner: readers whose orders of files are known. Pure.

The planner (`../planner.py`) asks these parts which unit of an order is next, and reports opens,
READs and changes of plans to them. Start with `stream_tracker.py`, which explains the positions of
one stream and names its parts: `stream_order.py`, `reader_position.py`, `claims.py`, `markers.py`,
`units_ahead.py` and `lateness.py`.

Other parts concern all streams: `changes.py` announces, extends, replaces and withdraws streams;
`stream_views.py` answers questions about them; `farthest_uses.py` finds the files that readers come
to last; `signs.py` finds the stream whose reader made a READ or an open; `watches.py` merges the
markers to watch. `units.py` cuts an order into units, the files of one push each.

One rule: only `changes.py` adds or removes a stream.
"""
