"""Object stores in buckets of S3, of Google and of Azure.

The library that speaks to buckets (obstore) hangs in forked children, and users' training processes
fork. So a user's process uses `proxy`, which starts a helper program (`proxy_process`) and sends it
each call; programs of DIESEL-FS call `direct` and then open buckets themselves. Only `store` and
`requests` know the library; `tests/test_layers.py` checks which modules import them.

Read in this order: `location` (URL, endpoint, credentials), `requests` (one request each), `store`
(the contract of an object store), `proxy`, `proxy_process`, `opening`, `direct`.
"""
