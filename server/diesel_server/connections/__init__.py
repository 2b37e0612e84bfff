"""Connections of clients, from the accepted socket to the last byte.

`listener.py` accepts, `channel.py` moves bytes, and `connection.py` greets, logs in, receives
requests and sends answers.
"""
