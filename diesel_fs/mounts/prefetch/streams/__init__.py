"""The streams of the prefetch planner: readers whose orders of files are known. Pure.

Start with `stream_tracker.py`, which explains the positions of one stream and names the modules of
its parts.

Other parts concern all streams: `changes.py` alone adds and removes streams; `stream_views.py`
answers questions about them; `farthest_uses.py` finds the files that readers come to last;
`signs.py` finds the stream whose reader made a READ or an open; `watches.py` merges the markers to
watch. `units.py` cuts an order into units, the files of one push each.
"""
