"""The places that hold bytes and rows: object stores, and metadata stores beside them.

`objects` is the interface of an object store, `folder` the one on a POSIX folder and `cloud` the
one in a bucket (with `cloud_place`, `cloud_requests`, and `retries` around it).
"""
