"""The places that hold bytes and rows: object stores, and metadata stores beside them.

`objects` is the interface of an object store and `folder` the one on a POSIX folder.
"""
