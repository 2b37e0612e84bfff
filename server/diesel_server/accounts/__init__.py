"""`authentication.py` checks logins against the table of accounts; `handlers.py` has the requests
by which administrators change that table.
"""
