"""The Python API: reads and writes datasets without a mount. Users import it as `diesel_fs`.

Read `dataset.py` first (`connect` and the class `Dataset`), then `pending_puts.py` (its writes),
`addressing.py` (paths and indices) and `reopening.py` (pickles). `extract.py` and `differences.py`
are for `dlcmd get` and `dlcmd diff`.
"""
