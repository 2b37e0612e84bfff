"""`diesel-server`: one port in front of an object store and a metadata store."""
