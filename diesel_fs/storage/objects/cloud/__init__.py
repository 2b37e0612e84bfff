"""Object stores in buckets of S3, Google and Azure.

The library that speaks to buckets (obstore) hangs in forked children, and users' training processes
fork. So training processes use `proxy`, which sends each call to a helper program
(`proxy_process`); programs of DIESEL-FS call `direct` and open buckets themselves. Read `location`,
`requests`, `store`, then `proxy`.
"""
